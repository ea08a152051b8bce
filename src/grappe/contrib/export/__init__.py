"""grappe export: a trained model as a C++ program, or as weights alone."""
