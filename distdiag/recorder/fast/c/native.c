/* The native frames of the main thread, written by a signal handler for the monitor to read.

   On a device backend no host blocks in a collective: it blocks later, in the first call that needs the device. Only native frames
   distinguish such a wait (cudaStreamSynchronize) from a computation. The handler unwinds the stack and writes the return addresses into a
   file; names are looked up by the monitor. It takes no lock, allocates nothing and needs no GIL: `backtrace` was called once at
   install, so that its library is loaded.

   The monitor sends the signal only to a rank that has made no progress for a while with operations in flight. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <execinfo.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { FRAMES = 62, PYTHON_FRAMES = 1024 };

typedef struct {
  uint64_t taken_ns; /* CLOCK_MONOTONIC */
  uint64_t frames;
  uint64_t address[FRAMES]; /* innermost first */
} Sample;

static int file = -1;
static pid_t main_thread;

static void on_signal(int number, siginfo_t *info, void *context) {
  (void)info, (void)context;
  int saved = errno;
  if ((pid_t)syscall(SYS_gettid) != main_thread) {
    syscall(SYS_tgkill, getpid(), main_thread, number); /* in a forked child this thread is missing: ESRCH */
  } else {
    Sample s;
    struct timespec t;
    memset(&s, 0, sizeof s);
    clock_gettime(CLOCK_MONOTONIC, &t);
    s.taken_ns = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    int n = backtrace((void **)s.address, FRAMES);
    s.frames = n > 0 ? (uint64_t)n : 0;
    if (pwrite(file, &s, sizeof s, 0) < 0) { /* the reader then sees no new sample */
    }
  }
  errno = saved;
}

static PyObject *install(PyObject *self, PyObject *args) {
  (void)self;
  int number, fd;
  if (!PyArg_ParseTuple(args, "ii", &number, &fd)) return NULL;
  void *first[4];
  backtrace(first, 4); /* loads its library now, not in the handler */
  main_thread = getpid();
  file = fd;
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_RESTART | SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  if (sigaction(number, &action, NULL) < 0) return PyErr_SetFromErrno(PyExc_OSError);
  Py_RETURN_NONE;
}

/* Return the Python frames of a thread, innermost first, all taken while this thread keeps the GIL.

   Python 3.11 makes a frame's object when somebody asks for it, and may collect garbage for that. A collection runs Python code
   (destructors, gc.callbacks), the other thread can continue meanwhile, and the new object then refers to a frame that has returned:
   reading it crashes. So no collection runs here. Afterwards f_back is safe: the objects exist, and a frame that returns keeps its link. */
static PyObject *frames_of(PyObject *self, PyObject *thread) {
  (void)self;
  PyObject *current = PySys_GetObject("_current_frames"), *all = NULL, *out = NULL;
  if (current == NULL) return PyList_New(0);
  int collects = PyGC_Disable();
  all = PyObject_CallNoArgs(current);
  if (all != NULL) out = PyList_New(0);
  PyObject *frame = out == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(all, thread));
  while (frame != NULL && PyList_GET_SIZE(out) < PYTHON_FRAMES) {
    if (PyList_Append(out, frame) < 0) Py_CLEAR(out);
    PyObject *back = out == NULL ? NULL : (PyObject *)PyFrame_GetBack((PyFrameObject *)frame);
    Py_SETREF(frame, back);
  }
  Py_XDECREF(frame);
  Py_XDECREF(all);
  if (collects) PyGC_Enable();
  if (PyErr_Occurred()) Py_CLEAR(out);
  return out;
}

static PyMethodDef methods[] = {
  {"frames_of", frames_of, METH_O, "frames_of(thread): the Python frames of a thread, innermost first; none if it has ended."},
  {"install", install, METH_VARARGS, "install(signal, fd): write the main thread's native frames to `fd` on this signal."},
  {NULL},
};

static struct PyModuleDef module = {
  PyModuleDef_HEAD_INIT, .m_name = "distdiag.recorder.fast._native", .m_doc = "Frames of the main thread, for other threads.", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
