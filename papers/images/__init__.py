"""Images a second that a small convolutional net learns, over ranks: Panda 2019."""
