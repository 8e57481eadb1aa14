from torch_hbmcomm.cli import main

if __name__ == "__main__":
    main()
