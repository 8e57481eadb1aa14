"""The images a second that AlexNet learns, by number of ranks: Panda 2019."""
