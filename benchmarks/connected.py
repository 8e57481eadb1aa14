"""Runs a program with a socket as its standard input and output: "connected.py FOLDER PROGRAM".

Open MPI's mpiexec starts this script for each rank. The script connects to the socket FOLDER/RANK,
on which the process that commands the program listens.
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
