"""Extensions, one a folder: the core finds their engines and commands by file name, and imports none of them."""
