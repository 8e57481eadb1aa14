"""Runs a program whose standard input and output are a connection to the one that commands it:
"connected.py FOLDER PROGRAM", under Open MPI's mpiexec, takes the socket of its rank in the folder.
"""

import os
import socket
import sys


def main() -> None:
    folder, program = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/{os.environ['OMPI_COMM_WORLD_RANK']}")
        for standard in (0, 1):
            os.dup2(connection.fileno(), standard)
    os.execv(program, [program])


if __name__ == "__main__":
    main()
