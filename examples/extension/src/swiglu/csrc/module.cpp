// Lets Python import the library, which registers its operators when it is loaded. Python.h is needed here alone.
#include <Python.h>

extern "C" PyObject* PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
