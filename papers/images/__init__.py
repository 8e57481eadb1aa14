"""The images a second that a small convolutional net learns, by number of ranks: Panda 2019."""
