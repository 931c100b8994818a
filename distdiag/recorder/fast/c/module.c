/* The types that Python sees: fast_hook, Ledger, and the bases of LastCallSite, Model and Gradients; see hot.h. */

#include "hot.h"
#include <unistd.h>

/* -- FastHook ------------------------------------------------------------------------------------------------------------- */

/* Count the error that is set; what is no Exception (Ctrl-C while a hook runs) belongs to the job. */
static PyObject *count_failure(FastHook *u) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
  PyObject *kind, *error, *tb;
  PyErr_Fetch(&kind, &error, &tb);
  PyErr_NormalizeException(&kind, &error, &tb);
  if (error != NULL && tb != NULL) PyException_SetTraceback(error, tb);
  PyObject *r = error == NULL ? NULL : PyObject_CallOneArg(u->ledger->failed, error); /* raises under pytest only */
  Py_XDECREF(kind);
  Py_XDECREF(error);
  Py_XDECREF(tb);
  if (r == NULL) return NULL;
  Py_DECREF(r);
  Py_RETURN_NONE;
}

/* 1 if a function or dispatch mode of the job is active in this thread; -1 with an error. */
static int mode_active(Ledger *s) {
  PyObject *counts[] = {s->function_modes, s->dispatch_modes};
  for (int i = 0; i < 2; i++) {
    PyObject *n = PyObject_CallNoArgs(counts[i]);
    long active = n == NULL ? -1 : PyLong_AsLong(n);
    Py_XDECREF(n);
    if (active) return active < 0 ? -1 : 1;
  }
  return 0;
}

/* Enter the context that hides our reads of tensors; returns a new reference. */
static PyObject *hide(Ledger *s) {
  PyObject *context = PyObject_CallNoArgs(s->unseen);
  PyObject *entered = context == NULL ? NULL : PyObject_CallMethod(context, "__enter__", NULL);
  if (entered == NULL) Py_CLEAR(context);
  Py_XDECREF(entered);
  return context;
}

/* Leave that context, with or without an error set. */
static void show(PyObject *context) {
  PyObject *kind, *error, *tb;
  PyErr_Fetch(&kind, &error, &tb);
  PyObject *left = PyObject_CallMethod(context, "__exit__", "OOO", Py_None, Py_None, Py_None);
  if (left == NULL) PyErr_Clear();
  Py_XDECREF(left);
  Py_DECREF(context);
  PyErr_Restore(kind, error, tb);
}

/* Call the hook in C if `fits`; call the Python function if not, or if the hook declines. */
static PyObject *either(FastHook *u, int fits, PyObject *const *args, size_t nargsf, PyObject *names) {
  PyObject *result = NULL;
  int r = fits ? u->hook(u->ledger, u, args, &result) : 0;
  if (r > 0) return result;
  if (r == 0) result = PyObject_Vectorcall(u->slow, args, nargsf, names);
  return result == NULL ? count_failure(u) : result;
}

static PyObject *fast_hook_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names) {
  FastHook *u = (FastHook *)self;
  int fits = names == NULL && PyVectorcall_NARGS(nargsf) == u->arguments;
  if (fits && !u->reads) {
    PyObject *result = NULL;
    int r = u->hook(u->ledger, u, args, &result);
    if (r > 0) return result;
    if (r < 0) return count_failure(u);
    fits = 0;
  }
  int modes = mode_active(u->ledger);
  if (modes == 0) return either(u, fits, args, nargsf, names);
  PyObject *context = modes < 0 ? NULL : hide(u->ledger);
  if (context == NULL) return count_failure(u);
  PyObject *result = either(u, fits, args, nargsf, names);
  show(context);
  return result;
}

static PyObject *fast_hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  PyObject *ledger, *slow, *of = Py_None;
  const char *name;
  if (!PyArg_ParseTuple(args, "O!sO|O", &LedgerType, &ledger, &name, &slow, &of)) return NULL;
  for (size_t i = 0; i < N_HOOKS; i++) {
    if (strcmp(name, HOOKS[i].name)) continue;
    if (HOOKS[i].of != NULL && !PyObject_TypeCheck(of, HOOKS[i].of))
      return PyErr_Format(PyExc_TypeError, "%s: of %s, not %s", name, HOOKS[i].of->tp_name, Py_TYPE(of)->tp_name);
    FastHook *u = PyObject_GC_New(FastHook, type);
    if (u == NULL) return NULL;
    u->call = fast_hook_call;
    u->ledger = (Ledger *)Py_NewRef(ledger);
    u->slow = Py_NewRef(slow);
    u->of = Py_NewRef(of);
    u->hook = HOOKS[i].hook;
    u->arguments = HOOKS[i].arguments;
    u->reads = HOOKS[i].reads;
    PyObject_GC_Track(u);
    return (PyObject *)u;
  }
  return PyErr_Format(PyExc_ValueError, "no hook '%s'", name);
}

/* There is no clear: torch may still call the hook, which then needs `slow`. */
static int fast_hook_traverse(FastHook *u, visitproc visit, void *arg) {
  Py_VISIT(u->ledger);
  Py_VISIT(u->slow);
  Py_VISIT(u->of);
  return 0;
}

static void fast_hook_dealloc(FastHook *u) {
  PyObject_GC_UnTrack(u);
  Py_CLEAR(u->ledger);
  Py_CLEAR(u->slow);
  Py_CLEAR(u->of);
  PyObject_GC_Del(u);
}

PyTypeObject FastHookType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "distdiag.recorder.fast._hot.fast_hook",
  .tp_doc = "fast_hook(ledger, name, slow, of=None): a hook; handles the common case in C and calls `slow` for the rest.",
  .tp_basicsize = sizeof(FastHook),
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC,
  .tp_vectorcall_offset = offsetof(FastHook, call),
  .tp_call = PyVectorcall_Call,
  .tp_new = fast_hook_new,
  .tp_traverse = (traverseproc)fast_hook_traverse,
  .tp_dealloc = (destructor)fast_hook_dealloc,
};

/* -- Ledger ------------------------------------------------------------------------------------------------------------ */

static int ledger_init(Ledger *s, PyObject *args, PyObject *kwargs) {
  PyObject *words, *failed, *tensor, *float32, *strided, *enabled, *functions, *dispatches, *unseen;
  Py_ssize_t head, ring, records;
  if (s->view.obj != NULL) {
    PyErr_SetString(PyExc_TypeError, "a ledger is initialised once");
    return -1;
  }
  if (!PyArg_ParseTuple(args, "OnnnOOOOOOOO", &words, &head, &ring, &records, &failed, &tensor, &float32, &strided, &enabled,
                        &functions, &dispatches, &unseen))
    return -1;
  if (PyObject_GetBuffer(words, &s->view, PyBUF_WRITABLE) < 0) return -1;
  if (head < 0 || ring < 0 || records < 1 || head > s->view.len / 8 - LIFE - 1 ||
      ring > s->view.len / 8 - records * RECORD_WORDS) {
    PyErr_SetString(PyExc_ValueError, "the words are not inside the page");
    return -1;
  }
  s->words = s->view.buf;
  s->head = s->words + head;
  s->ring = s->words + ring;
  s->records = (uint64_t)records;
  s->n_words = (uint64_t)s->view.len / 8;
  s->failed = Py_NewRef(failed);
  s->tensor = Py_NewRef(tensor);
  s->float32 = Py_NewRef(float32);
  s->strided = Py_NewRef(strided);
  s->grad_enabled = Py_NewRef(enabled);
  s->function_modes = Py_NewRef(functions);
  s->dispatch_modes = Py_NewRef(dispatches);
  s->unseen = Py_NewRef(unseen);
  s->idle = OTHER;
  s->always = 1;
  s->count_at = -1;
  s->step_start_ns = now_ns();
  s->models = PyDict_New();
  s->pending = PyList_New(0);
  s->later = PyList_New(0);
  return s->models == NULL || s->pending == NULL || s->later == NULL ? -1 : 0;
}

/* The objects that a ledger holds; the last of them, from `newest` on, a hook can do without. */
static const size_t HELD[] = {
  offsetof(Ledger, models), offsetof(Ledger, pending), offsetof(Ledger, later), offsetof(Ledger, failed),
  offsetof(Ledger, tensor), offsetof(Ledger, float32), offsetof(Ledger, strided), offsetof(Ledger, grad_enabled),
  offsetof(Ledger, function_modes), offsetof(Ledger, dispatch_modes), offsetof(Ledger, unseen),
  offsetof(Ledger, newest), offsetof(Ledger, entered), offsetof(Ledger, lead), offsetof(Ledger, averaged_by),
};
enum { N_HELD = sizeof HELD / sizeof *HELD, N_NEEDED = N_HELD - 4 };

static PyObject **held(Ledger *s, size_t i) { return (PyObject **)((char *)s + HELD[i]); }

static int ledger_traverse(Ledger *s, visitproc visit, void *arg) {
  for (size_t i = 0; i < N_HELD; i++) Py_VISIT(*held(s, i));
  return 0;
}

static int ledger_clear(Ledger *s) {
  for (size_t i = N_NEEDED; i < N_HELD; i++) Py_CLEAR(*held(s, i));
  return 0;
}

static void ledger_dealloc(Ledger *s) {
  PyObject_GC_UnTrack(s);
  for (size_t i = 0; i < N_HELD; i++) Py_CLEAR(*held(s, i));
  if (s->view.obj != NULL) PyBuffer_Release(&s->view);
  Py_TYPE(s)->tp_free(s);
}

static PyObject *ledger_get_loss(Ledger *s, void *_) {
  return s->loss_known ? PyFloat_FromDouble(s->loss) : Py_NewRef(Py_None);
}

static int ledger_set_loss(Ledger *s, PyObject *value, void *_) {
  double loss = value == NULL || value == Py_None ? 0.0 : PyFloat_AsDouble(value);
  if (loss == -1.0 && PyErr_Occurred()) return -1;
  s->loss = loss;
  s->loss_known = value != NULL && value != Py_None;
  return 0;
}

static PyObject *ledger_close(Ledger *s, PyObject *time) {
  uint64_t t;
  if (time_of(time, &t) < 0) return NULL;
  close_step(s, t);
  begin_step(s, t);
  Py_RETURN_NONE;
}

static PyObject *ledger_begin(Ledger *s, PyObject *time) {
  uint64_t t;
  if (time_of(time, &t) < 0) return NULL;
  begin_step(s, t);
  Py_RETURN_NONE;
}

#define NUMBER(name) {#name, T_ULONGLONG, offsetof(Ledger, name), 0, NULL}
#define SIGNED(name) {#name, T_LONGLONG, offsetof(Ledger, name), 0, NULL}
#define TRUTH(name) {#name, T_BOOL, offsetof(Ledger, name), 0, NULL}
#define OBJECT(name) {#name, T_OBJECT, offsetof(Ledger, name), 0, NULL}
#define KEPT(name) {#name, T_OBJECT, offsetof(Ledger, name), READONLY, NULL}
static PyMemberDef ledger_members[] = {
  NUMBER(main_thread), NUMBER(idle), NUMBER(data_ns), NUMBER(forward_ns), NUMBER(backward_ns), NUMBER(optimizer_ns),
  NUMBER(wait_ns), NUMBER(ready_ns), NUMBER(last_ready_ns), NUMBER(forward_wait_ns), NUMBER(arrived_ns), NUMBER(optimizer_wait_ns), NUMBER(step_start_ns), NUMBER(samples), NUMBER(batch), NUMBER(elements),
  NUMBER(optimizer_start_ns), NUMBER(reduced_elements), NUMBER(next_event), NUMBER(loader), NUMBER(batches_at),
  NUMBER(counted_site), SIGNED(count_at), SIGNED(bad_losses), SIGNED(lead_misses), TRUTH(always),
  TRUTH(trained), TRUTH(cuda), TRUTH(on_device), OBJECT(newest), OBJECT(entered), OBJECT(lead), OBJECT(averaged_by), KEPT(models),
  KEPT(pending), KEPT(later), {NULL},
};
static PyGetSetDef ledger_getset[] = {
  {"loss", (getter)ledger_get_loss, (setter)ledger_set_loss, NULL, NULL}, {NULL},
};
static PyMethodDef ledger_methods[] = {
  {"close_step", (PyCFunction)ledger_close, METH_O, "Write the record of the step that ends at this time, and begin the next."},
  {"begin_step", (PyCFunction)ledger_begin, METH_O, "Begin a step at this time."},
  {NULL},
};
PyTypeObject LedgerType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "distdiag.recorder.fast._hot.Ledger",
  .tp_doc = "What the hooks of a step share; see hot.Ledger.",
  .tp_basicsize = sizeof(Ledger),
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
  .tp_new = PyType_GenericNew,
  .tp_init = (initproc)ledger_init,
  .tp_traverse = (traverseproc)ledger_traverse,
  .tp_clear = (inquiry)ledger_clear,
  .tp_dealloc = (destructor)ledger_dealloc,
  .tp_members = ledger_members,
  .tp_getset = ledger_getset,
  .tp_methods = ledger_methods,
};

/* -- CollectionTimer ------------------------------------------------------------------------------------------------------- */

/* A callback of the garbage collector. In C, because Python prints and drops what a callback raises: a Ctrl-C that comes during a
   collection is raised by the first Python code after it, which must be the job's own. */
typedef struct {
  PyObject_HEAD
  Py_buffer view;
  volatile uint64_t *ns, *count;
  uint64_t began;
  pid_t pid; /* a forked child inherits the callback and the page */
} CollectionTimer;

static int timer_init(CollectionTimer *t, PyObject *args, PyObject *kwargs) {
  PyObject *words;
  Py_ssize_t ns, count;
  if (t->view.obj != NULL) {
    PyErr_SetString(PyExc_TypeError, "a timer is initialised once");
    return -1;
  }
  if (!PyArg_ParseTuple(args, "Onn", &words, &ns, &count)) return -1;
  if (PyObject_GetBuffer(words, &t->view, PyBUF_WRITABLE) < 0) return -1;
  if (ns < 0 || count < 0 || ns >= t->view.len / 8 || count >= t->view.len / 8) {
    PyErr_SetString(PyExc_ValueError, "the words are not inside the page");
    return -1;
  }
  t->ns = (volatile uint64_t *)t->view.buf + ns;
  t->count = (volatile uint64_t *)t->view.buf + count;
  t->pid = getpid();
  return 0;
}

static PyObject *timer_call(CollectionTimer *t, PyObject *args, PyObject *kwargs) {
  PyObject *phase = PyTuple_GET_SIZE(args) == 2 ? PyTuple_GET_ITEM(args, 0) : NULL;
  PyObject *info = phase != NULL ? PyTuple_GET_ITEM(args, 1) : NULL;
  if (info == NULL || !PyDict_Check(info) || !PyUnicode_Check(phase) || t->view.obj == NULL) Py_RETURN_NONE;
  PyObject *generation = PyDict_GetItemString(info, "generation");
  if (generation == NULL || !PyLong_Check(generation) || PyLong_AsLong(generation) < 2 || getpid() != t->pid)
    Py_RETURN_NONE;
  if (PyUnicode_CompareWithASCIIString(phase, "start") == 0) {
    t->began = now_ns();
  } else if (t->began) {
    *t->ns += now_ns() - t->began;
    *t->count += 1;
  }
  Py_RETURN_NONE;
}

static void timer_dealloc(CollectionTimer *t) {
  PyBuffer_Release(&t->view);
  Py_TYPE(t)->tp_free(t);
}

static PyTypeObject CollectionTimerType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "distdiag.recorder.fast._hot.CollectionTimer",
  .tp_doc = "CollectionTimer(words, ns, count): sums the time of full collections, and counts them, in two words of the page.",
  .tp_basicsize = sizeof(CollectionTimer),
  .tp_flags = Py_TPFLAGS_DEFAULT,
  .tp_new = PyType_GenericNew,
  .tp_init = (initproc)timer_init,
  .tp_call = (ternaryfunc)timer_call,
  .tp_dealloc = (destructor)timer_dealloc,
};

/* -- CallFrame, ModelWords, GradientWords: bases of classes in Python -------------------------------------------------------- */

#define BASE(type, dealloc, members)                                                                               \
  {PyVarObject_HEAD_INIT(NULL, 0).tp_name = "distdiag.recorder.fast._hot." #type, .tp_basicsize = sizeof(type),         \
   .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, .tp_new = PyType_GenericNew,                              \
   .tp_dealloc = (destructor)dealloc, .tp_members = members}

static void call_frame_dealloc(CallFrame *p) {
  Py_CLEAR(p->code);
  Py_TYPE(p)->tp_free(p);
}

static PyMemberDef call_frame_members[] = {
  {"code", T_OBJECT, offsetof(CallFrame, code), 0, NULL},
  {"depth", T_LONG, offsetof(CallFrame, depth), 0, NULL},
  {"instruction", T_LONG, offsetof(CallFrame, instruction), 0, NULL},
  {"site", T_ULONGLONG, offsetof(CallFrame, site), 0, NULL},
  {NULL},
};

PyTypeObject CallFrameType = BASE(CallFrame, call_frame_dealloc, call_frame_members);

static void model_dealloc(ModelWords *m) {
  Py_CLEAR(m->ref);
  Py_CLEAR(m->forward);
  Py_TYPE(m)->tp_free(m);
}

static PyMemberDef model_members[] = {
  {"ref", T_OBJECT, offsetof(ModelWords, ref), 0, NULL},
  {"forward", T_OBJECT, offsetof(ModelWords, forward), 0, NULL},
  {"group_at", T_LONGLONG, offsetof(ModelWords, group_at), 0, NULL},
  {"forward_count", T_LONGLONG, offsetof(ModelWords, forward_count), 0, NULL},
  {"forwards_at", T_ULONGLONG, offsetof(ModelWords, forwards_at), 0, NULL},
  {"synced_at", T_ULONGLONG, offsetof(ModelWords, synced_at), 0, NULL},
  {"forward_site", T_ULONGLONG, offsetof(ModelWords, forward_site), 0, NULL},
  {NULL},
};

PyTypeObject ModelWordsType = BASE(ModelWords, model_dealloc, model_members);

static PyMemberDef gradient_members[] = {
  {"n", T_LONGLONG, offsetof(GradientWords, n), 0, NULL},
  {"stride", T_LONGLONG, offsetof(GradientWords, stride), 0, NULL},
  {"plain", T_BOOL, offsetof(GradientWords, plain), 0, NULL},
  {NULL},
};

PyTypeObject GradientWordsType = BASE(GradientWords, NULL, gradient_members);

static struct PyModuleDef module = {
  PyModuleDef_HEAD_INIT, .m_name = "distdiag.recorder.fast._hot", .m_doc = "The fast path of the hooks, in C; see accounts.py.", .m_size = -1,
};

/* CONSTANTS: words of the header, counted from `phase`, and members of the enumerations in layout.py. RECORD: fields of a step
   record, in order. */
static int export_constants(PyObject *m) {
  static const struct { const char *name; int value; } constants[] = {
    {"phase", PHASE}, {"phase_since_ns", SINCE}, {"blocked", BLOCKED}, {"blocked_at", BLOCKED_AT},
    {"blocked_site", BLOCKED_SITE}, {"blocked_since_ns", BLOCKED_SINCE}, {"step", STEP}, {"micro_steps", MICRO_STEPS},
    {"n_steps", N_STEPS}, {"n_calls", N_CALLS}, {"epoch", EPOCH}, {"device_bytes", DEVICE_BYTES}, {"life", LIFE},
    {"DATA", DATA}, {"FORWARD", FORWARD}, {"BACKWARD", BACKWARD}, {"OPTIMIZER", OPTIMIZER}, {"OTHER", OTHER},
    {"VALIDATE", VALIDATE}, {"DDP", IN_DDP}, {"STARTING", STARTING}, {"RUNNING", RUNNING}, {"FINGERPRINTS", FINGERPRINTS},
    {"SLOW_IS_GUARDED", 1},
  };
#define RECORD_NAME(field) #field,
  static const char *record[] = {RECORD_FIELDS(RECORD_NAME)};
  PyObject *values = PyDict_New(), *fields = PyTuple_New(RECORD_WORDS);
  int failed = values == NULL || fields == NULL;
  for (size_t i = 0; !failed && i < sizeof constants / sizeof *constants; i++) {
    PyObject *value = PyLong_FromLong(constants[i].value);
    failed = value == NULL || PyDict_SetItemString(values, constants[i].name, value) < 0;
    Py_XDECREF(value);
  }
  for (int i = 0; !failed && i < RECORD_WORDS; i++) {
    PyObject *name = PyUnicode_FromString(record[i]);
    if (name == NULL) failed = 1;
    else PyTuple_SET_ITEM(fields, i, name);
  }
  failed = failed || PyModule_AddObjectRef(m, "CONSTANTS", values) < 0 || PyModule_AddObjectRef(m, "RECORD", fields) < 0;
  Py_XDECREF(values);
  Py_XDECREF(fields);
  return failed ? -1 : 0;
}

PyMODINIT_FUNC PyInit__hot(void) {
  static const struct { PyTypeObject *type; const char *name; } types[] = {
    {&LedgerType, "Ledger"}, {&CallFrameType, "CallFrame"}, {&ModelWordsType, "ModelWords"},
    {&GradientWordsType, "GradientWords"}, {&FastHookType, "fast_hook"}, {&CollectionTimerType, "CollectionTimer"},
  };
  if (intern_names() < 0) return NULL;
  PyObject *m = PyModule_Create(&module);
  if (m == NULL) return NULL;
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    if (PyType_Ready(types[i].type) < 0 || PyModule_AddObjectRef(m, types[i].name, (PyObject *)types[i].type) < 0) return NULL;
  if (export_constants(m) < 0) return NULL;
  return m;
}
