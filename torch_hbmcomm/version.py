"""The package's version: pip, the C++ build and the command line take it from here."""

__version__ = "0.1.0.dev0"
