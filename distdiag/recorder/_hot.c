/* The usual way of every step's hooks, in C: what `hot.py` and `step_hooks.py` say in Python, where nothing special happens.

   Each hook is a `usual` object around a Python function that can do all of it. Here only the common case is done, after
   every condition for it was seen to hold; otherwise, before anything was written, the Python function is called. Between two
   hooks a step's computation empties the caches, and then a Python function costs ten times what it costs in a loop.

   Nothing here may raise into the job: what goes wrong is handed to `failed`, which counts it. Compiled at install where a C
   compiler is there; not loaded by a Python without the GIL, which is what keeps two threads out of here. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

#define LAYOUT 5 /* of the page, and of what this file and hot.py agree upon */

enum { PHASE, SINCE, BLOCKED, BLOCKED_AT, BLOCKED_SITE, BLOCKED_SINCE, STEP, MICRO_STEPS, N_STEPS, N_CALLS, EPOCH,
       DEVICE_BYTES, LIFE };                                           /* words of the header, from `phase` on */
enum { DATA = 1, FORWARD = 3, BACKWARD = 4, OPTIMIZER = 5, VALIDATE = 9 }; /* layout.Phase */
enum { IN_DDP = 2 };                                                   /* layout.Blocked */
enum { RECORD_WORDS = 17, FINGERPRINTS = 6 };

typedef unsigned long long ull;
typedef struct {
  PyObject_HEAD
  Py_buffer view;
  volatile uint64_t *words, *head, *ring; /* the page, its header from `phase` on, its step records */
  uint64_t records;
  ull main_thread, idle, data_ns, forward_ns, backward_ns, optimizer_ns, wait_ns, ready_ns, last_ready_ns;
  ull step_start_ns, samples, batch, optimizer_start_ns, reduced_elements, next_look, loader, batches_at, active_at;
  ull counted_site;
  long long count_at, bad_losses, lead_misses;
  double loss;
  char loss_known, always, trained, cuda, on_device;
  PyObject *newest, *lead, *averaged_by;
  PyObject *models, *pending, *later;                        /* dict, list, list */
  PyObject *failed, *tensor, *float32, *strided, *grad_enabled;
} Ledger;

typedef struct {
  PyObject_HEAD
  PyObject *code;
  long depth, instruction;
  ull site;
} Place;

typedef struct {
  PyObject_HEAD
  PyObject *ref;      /* weak, of the DDP module */
  PyObject *forward;  /* a Place */
  long long group_at, forward_count;
  ull forwards_at, synced_at, forward_site;
} ModelWords;

typedef struct {
  PyObject_HEAD
  ull at;
  long long n, stride;
  char plain;
} GradientWords;

static PyTypeObject LedgerType, PlaceType, ModelWordsType, GradientWordsType, UsualType;
static PyObject *getframe, *s_shape, *s_is_cpu, *s_grad, *s_dtype, *s_data_ptr, *s_sync, *s_layout, *s_numel, *s_is_contiguous;

static inline uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline int elsewhere(const Ledger *s) { return PyThread_get_thread_ident() != s->main_thread; }

static inline uint64_t enter(Ledger *s, uint64_t phase) {
  s->head[PHASE] = phase;
  return s->head[SINCE] = now_ns();
}

static inline void block(Ledger *s, uint64_t group, uint64_t site) {
  s->head[BLOCKED_AT] = group;
  s->head[BLOCKED_SITE] = site;
  s->head[BLOCKED_SINCE] = now_ns();
  s->head[BLOCKED] = IN_DDP;
}

/* The object of a weak reference, new; NULL, without an error, where it is gone. */
static PyObject *alive(PyObject *ref) {
  if (ref == NULL || !PyWeakref_Check(ref)) return NULL;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject *found = NULL;
  PyWeakref_GetRef(ref, &found);
  return found;
#else
  PyObject *found = PyWeakref_GetObject(ref);
  return found == Py_None ? NULL : Py_XNewRef(found);
#endif
}

/* Whether the user's code calls from where it called last: so many frames above the one that called us. */
static int same_place(Place *p) {
  if (p->code == NULL || p->code == Py_None) return 0;
  PyObject *depth = PyLong_FromLong(p->depth);
  if (depth == NULL) return -1;
  PyObject *frame = PyObject_CallOneArg(getframe, depth);
  Py_DECREF(depth);
  if (frame == NULL) { /* fewer frames than before */
    if (!PyErr_ExceptionMatches(PyExc_ValueError)) return -1;
    PyErr_Clear();
    return 0;
  }
  PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
  int same = code == p->code && PyFrame_GetLasti((PyFrameObject *)frame) == p->instruction;
  Py_DECREF(code);
  Py_DECREF(frame);
  return same;
}

static ModelWords *model_of(Ledger *s, PyObject *module) { /* borrowed; NULL, mostly without an error, where not known */
  if (s->models == NULL || !PyDict_Check(s->models)) return NULL;
  PyObject *key = PyLong_FromVoidPtr(module);
  if (key == NULL) return NULL;
  PyObject *found = PyDict_GetItemWithError(s->models, key);
  Py_DECREF(key);
  return found != NULL && PyObject_TypeCheck(found, &ModelWordsType) ? (ModelWords *)found : NULL;
}

static int grad_enabled(Ledger *s) {
  PyObject *r = PyObject_CallNoArgs(s->grad_enabled);
  if (r == NULL) return -1;
  int yes = r == Py_True;
  Py_DECREF(r);
  return yes;
}

static void close_step(Ledger *s, uint64_t t) {
  volatile uint64_t *h = s->head;
  uint64_t ready = s->ready_ns ? s->ready_ns : s->last_ready_ns;
  uint64_t number = h[N_STEPS] + 1, step = h[STEP] + 1;
  volatile uint64_t *w = s->ring + (number - 1) % s->records * RECORD_WORDS;
  union { double d; uint64_t u; } loss = {.d = s->loss};
  w[0] = 0; /* a half-written record is recognised */
  __atomic_thread_fence(__ATOMIC_RELEASE);
  w[1] = step;
  w[2] = h[EPOCH];
  w[3] = s->step_start_ns;
  w[4] = t;
  w[5] = s->data_ns;
  w[6] = 0;
  w[7] = s->forward_ns;
  w[8] = s->backward_ns;
  w[9] = s->optimizer_ns;
  w[10] = s->wait_ns;
  w[11] = ready > s->step_start_ns ? ready : 0;
  w[12] = s->samples;
  w[13] = s->batch;
  if (s->loss_known) w[14] = loss.u;
  w[15] = (uint64_t)s->loss_known;
  w[16] = h[DEVICE_BYTES];
  __atomic_store_n(w, number, __ATOMIC_RELEASE);
  __atomic_store_n(h + N_STEPS, number, __ATOMIC_RELEASE);
  h[STEP] = step;
}

static void begin_step(Ledger *s, uint64_t t) {
  s->step_start_ns = t;
  s->data_ns = s->forward_ns = s->backward_ns = s->optimizer_ns = s->wait_ns = s->ready_ns = 0;
  s->samples = s->batch = 0;
  s->loss_known = 0;
  if (s->head[LIFE] == 0) s->head[LIFE] = 1; /* STARTING, RUNNING */
}

/* -- the hooks: 1 done, with its result; 0 not the usual case, nothing done; -1 an error ----------------------------------- */

typedef struct Usual Usual;
typedef int (*Hook)(Ledger *, Usual *, PyObject *const *, PyObject **);
struct Usual {
  PyObject_HEAD
  vectorcallfunc call;
  Ledger *ledger;
  PyObject *general, *of;
  Hook hook;
  Py_ssize_t arguments;
};

static int begins(uint64_t t, PyObject **result) { return (*result = PyLong_FromUnsignedLongLong(t)) == NULL ? -1 : 1; }

static int done(PyObject **result) {
  *result = Py_NewRef(Py_None);
  return 1;
}

static int began_of(PyObject *argument, uint64_t *began) {
  *began = PyLong_AsUnsignedLongLong(argument);
  return *began == (uint64_t)-1 && PyErr_Occurred() ? -1 : 1;
}

static int data_begins(Ledger *s, Usual *u, PyObject *const *args, PyObject **result) {
  return begins(elsewhere(s) ? 0 : enter(s, DATA), result);
}

static int data_ends(Ledger *s, Usual *u, PyObject *const *args, PyObject **result) { /* iterator, batch, began */
  uint64_t began;
  PyObject *batch = args[1];
  if (s->loader == 0 || s->loader != (ull)(uintptr_t)args[0] || s->words[s->batches_at] < FINGERPRINTS) return 0;
  int list = PyList_CheckExact(batch);
  if (!list && !PyTuple_CheckExact(batch)) return 0;
  if ((list ? PyList_GET_SIZE(batch) : PyTuple_GET_SIZE(batch)) == 0) return 0;
  PyObject *x = list ? PyList_GET_ITEM(batch, 0) : PyTuple_GET_ITEM(batch, 0);
  if ((PyObject *)Py_TYPE(x) != s->tensor) return 0;
  PyObject *shape = PyObject_GetAttr(x, s_shape);
  if (shape == NULL) return -1;
  if (!PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) == 0) {
    Py_DECREF(shape);
    return 0;
  }
  ull n = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, 0));
  Py_DECREF(shape);
  if (n == (ull)-1 && PyErr_Occurred()) return -1;
  PyObject *newest = PyWeakref_NewRef(x, NULL);
  if (newest == NULL || began_of(args[2], &began) < 0) {
    Py_XDECREF(newest);
    return -1;
  }
  uint64_t t = enter(s, s->idle);
  s->data_ns += t - began;
  s->words[s->batches_at] += 1;
  s->words[s->active_at] = t;
  s->samples += n;
  if (s->batch == 0) s->batch = n;
  Py_XSETREF(s->newest, newest);
  return done(result);
}

/* The time, odd where gradients are wanted: a nanosecond more or less. 0: nothing is to be ended. */
static int forward_begins(Ledger *s, Usual *u, PyObject *const *args, PyObject **result) { /* module, inputs */
  if (elsewhere(s) || s->cuda || (s->later != NULL && PyList_GET_SIZE(s->later))) return 0;
  ModelWords *m = model_of(s, args[0]);
  if (m == NULL) return PyErr_Occurred() ? -1 : 0;
  if (m->forward_count < 0 || m->forward == NULL || !PyObject_TypeCheck(m->forward, &PlaceType)) return 0;
  int training = grad_enabled(s);
  if (training < 0) return -1;
  if (training && (s->words[m->forwards_at] == 0 || s->batch == 0)) return 0;
  Place *p = (Place *)m->forward;
  int same = p->site == m->forward_site ? same_place(p) : 0;
  if (same < 1) return same;
  s->words[m->forward_count] += 1;
  if (training) s->words[m->forwards_at] += 1;
  uint64_t t = enter(s, training ? FORWARD : VALIDATE);
  return begins(training ? t | 1 : t & ~(uint64_t)1, result);
}

static int forward_ends(Ledger *s, Usual *u, PyObject *const *args, PyObject **result) { /* module, began */
  uint64_t began;
  if (s->on_device || s->pending == NULL) return 0;
  if (began_of(args[1], &began) < 0) return -1;
  ModelWords *m = model_of(s, args[0]);
  if (m == NULL) return PyErr_Occurred() ? -1 : 0;
  int training = began & 1;
  if (training) {
    if (s->words[m->forwards_at] == 1) return 0; /* the first one was watched */
    int there = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(s->pending); i++) there |= PyList_GET_ITEM(s->pending, i) == (PyObject *)m;
    if (!there && PyList_Append(s->pending, (PyObject *)m) < 0) return -1;
  }
  s->head[PHASE] = s->idle;
  s->head[BLOCKED] = 0;
  uint64_t t = s->head[SINCE] = now_ns();
  if (training) s->forward_ns += t - began;
  return done(result);
}

static int sync_begins(Ledger *s, Usual *u, PyObject *const *args, PyObject **result) { /* module */
  if (elsewhere(s)) return begins(0, result);
  ModelWords *m = model_of(s, args[0]);
  if (m == NULL && PyErr_Occurred()) return -1;
  if (m == NULL || m->group_at < 0) return begins(0, result);
  block(s, (uint64_t)m->group_at, m->forward_site);
  return begins(s->head[BLOCKED_SINCE], result);
}

static int sync_ends(Ledger *s, Usual *u, PyObject *const *args, PyObject **result) { /* began */
  uint64_t began;
  if (began_of(args[0], &began) < 0) return -1;
  s->head[BLOCKED] = 0;
  s->wait_ns += now_ns() - began;
  return done(result);
}

/* Whether an attribute is this very object. */
static int is(PyObject *of, PyObject *name, PyObject *what) {
  PyObject *found = PyObject_GetAttr(of, name);
  Py_XDECREF(found); /* only to be compared */
  return found == NULL ? -1 : found == what;
}

/* Where a tensor's elements lie; 0, without an error, where it has no memory of its own. */
static ull address_of(PyObject *t) {
  PyObject *at = PyObject_CallMethodNoArgs(t, s_data_ptr);
  ull address = at == NULL ? 0 : PyLong_AsUnsignedLongLong(at);
  Py_XDECREF(at);
  PyErr_Clear();
  return address;
}

/* The value of a loss as most are: one float32 on the CPU, finite. Read from memory: to ask torch for it takes three times
   as long. */
static int plain_loss(Ledger *s, PyObject *t, double *value) {
  if (PyTuple_CheckExact(t) && PyTuple_GET_SIZE(t) == 1) t = PyTuple_GET_ITEM(t, 0);
  if (s->bad_losses || (PyObject *)Py_TYPE(t) != s->tensor) return 0;
  PyObject *shape = PyObject_GetAttr(t, s_shape);
  if (shape == NULL) return -1;
  int scalar = PyTuple_Check(shape) && PyTuple_GET_SIZE(shape) == 0;
  Py_DECREF(shape);
  if (!scalar) return 0;
  int r = is(t, s_is_cpu, Py_True);
  if (r > 0) r = is(t, s_dtype, s->float32);
  if (r < 1) return r;
  ull at = address_of(t);
  if (at == 0) return 0;
  *value = *(const float *)(uintptr_t)at;
  return *value - *value == 0.0; /* NaN where it is not finite */
}

static int backward_begins(Ledger *s, Usual *u, PyObject *const *args, PyObject **result) { /* tensors */
  if (elsewhere(s) || s->on_device || !s->trained || s->reduced_elements || s->pending == NULL) return 0;
  Py_ssize_t waiting = PyList_GET_SIZE(s->pending);
  if (waiting > 1) return 0;
  Place *p = (Place *)u->of;
  int same = same_place(p);
  if (same < 1) return same;
  ModelWords *m = NULL;
  if (waiting) {
    PyObject *first = PyList_GET_ITEM(s->pending, 0);
    if (!PyObject_TypeCheck(first, &ModelWordsType)) return 0;
    PyObject *module = alive(((ModelWords *)first)->ref);
    if (module == NULL) return 0;
    PyObject *sync = PyObject_GetAttr(module, s_sync);
    Py_DECREF(module);
    if (sync == NULL) return -1;
    int averages = PyObject_IsTrue(sync);
    Py_DECREF(sync);
    if (averages < 0) return -1;
    if (averages) {
      if (p->site != s->counted_site || s->count_at < 0) return 0;
      m = (ModelWords *)first;
    }
  }
  double loss = 0;
  int plain = plain_loss(s, args[0], &loss);
  if (plain < 1) return plain;
  s->head[MICRO_STEPS] += 1;
  s->loss = loss;
  s->loss_known = 1;
  s->ready_ns = 0;
  if (m != NULL) {
    Py_XSETREF(s->averaged_by, Py_NewRef(m));
    s->words[s->count_at] += 1;
    s->words[m->synced_at] += 1;
    if (m->group_at >= 0) block(s, (uint64_t)m->group_at, p->site);
    if (PyList_SetSlice(s->pending, 0, 1, NULL) < 0) return -1;
  }
  return begins(enter(s, BACKWARD), result);
}

static int backward_ends(Ledger *s, Usual *u, PyObject *const *args, PyObject **result) { /* began */
  uint64_t began;
  if (s->on_device) return 0;
  if (began_of(args[0], &began) < 0) return -1;
  s->head[PHASE] = s->idle;
  s->head[BLOCKED] = 0;
  uint64_t t = s->head[SINCE] = now_ns();
  s->backward_ns += t - began;
  if (s->ready_ns > began) s->wait_ns += t - s->ready_ns;
  return done(result);
}

/* Whether a gradient lies in the CPU's memory, as many elements as its parameter has without a gap. */
static int as_its_parameter(PyObject *g, GradientWords *w) {
  int r = is(g, s_is_cpu, Py_True);
  if (r < 1) return r;
  PyObject *n = PyObject_CallMethodNoArgs(g, s_numel);
  long long elements = n == NULL ? -1 : PyLong_AsLongLong(n);
  Py_XDECREF(n);
  if (PyErr_Occurred()) return -1;
  if (elements != w->n) return 0;
  PyObject *dense = PyObject_CallMethodNoArgs(g, s_is_contiguous);
  Py_XDECREF(dense);
  return dense == NULL ? -1 : dense == Py_True;
}

static int gradient_is_ready(Ledger *s, Usual *u, PyObject *const *args, PyObject **result) { /* parameter */
  GradientWords *w = (GradientWords *)u->of;
  s->ready_ns = now_ns();
  if (!w->plain || w->stride < 1) return 0;
  PyObject *g = PyObject_GetAttr(args[0], s_grad);
  if (g == NULL) return -1;
  double total = 0;
  int usual = (PyObject *)Py_TYPE(g) == s->tensor;
  if (usual) usual = is(g, s_layout, s->strided);
  if (usual > 0) usual = is(g, s_dtype, s->float32);
  if (usual > 0) {
    ull address = address_of(g);
    usual = address != 0;
    /* mostly it takes the place of the last one: what was seen of that need not be asked again */
    if (usual && address != w->at) usual = as_its_parameter(g, w);
    if (usual > 0) {
      w->at = address;
      for (long long i = 0; i < w->n; i += w->stride) total += ((const float *)(uintptr_t)address)[i];
    }
  }
  Py_DECREF(g);
  return usual > 0 ? (total - total == 0.0 ? done(result) : 0) : usual;
}

static int optimizer_begins(Ledger *s, Usual *u, PyObject *const *args, PyObject **result) {
  if (elsewhere(s)) return done(result);
  if (s->on_device || s->always || s->reduced_elements || s->head[STEP] + 1 >= s->next_look) return 0;
  s->optimizer_start_ns = enter(s, OPTIMIZER);
  return done(result);
}

static int optimizer_ends(Ledger *s, Usual *u, PyObject *const *args, PyObject **result) { /* optimizer, … */
  if (s->optimizer_start_ns == 0 || elsewhere(s)) return done(result);
  uint64_t step = s->head[STEP] + 1;
  if (s->on_device || step < 64 || (step & 63) == 0) return 0;
  PyObject *lead = alive(s->lead);
  Py_XDECREF(lead); /* only to be compared */
  if (lead != args[0]) return 0;
  uint64_t t = enter(s, s->idle);
  s->optimizer_ns += t - s->optimizer_start_ns;
  s->optimizer_start_ns = 0;
  s->lead_misses = 0;
  close_step(s, t);
  begin_step(s, t);
  return done(result);
}

static const struct { const char *name; Hook hook; Py_ssize_t arguments; PyTypeObject *of; } HOOKS[] = {
  {"data_begins", data_begins, 1, NULL}, {"data_ends", data_ends, 3, NULL},
  {"forward_begins", forward_begins, 2, NULL}, {"forward_ends", forward_ends, 2, NULL},
  {"sync_begins", sync_begins, 1, NULL}, {"sync_ends", sync_ends, 1, NULL},
  {"backward_begins", backward_begins, 1, &PlaceType}, {"backward_ends", backward_ends, 1, NULL},
  {"gradient_is_ready", gradient_is_ready, 1, &GradientWordsType},
  {"optimizer_begins", optimizer_begins, 3, NULL}, {"optimizer_ends", optimizer_ends, 3, NULL},
};

/* -- Usual ------------------------------------------------------------------------------------------------------------- */

static PyObject *count_failure(Usual *u) {
  PyObject *kind, *error, *tb;
  PyErr_Fetch(&kind, &error, &tb);
  PyErr_NormalizeException(&kind, &error, &tb);
  PyObject *r = error == NULL ? NULL : PyObject_CallOneArg(u->ledger->failed, error); /* raises under pytest only */
  Py_XDECREF(kind);
  Py_XDECREF(error);
  Py_XDECREF(tb);
  if (r == NULL) return NULL;
  Py_DECREF(r);
  Py_RETURN_NONE;
}

static PyObject *usual_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names) {
  Usual *u = (Usual *)self;
  if (names == NULL && PyVectorcall_NARGS(nargsf) == u->arguments) {
    PyObject *result = NULL;
    int r = u->hook(u->ledger, u, args, &result);
    if (r > 0) return result;
    if (r < 0) return count_failure(u);
  }
  return PyObject_Vectorcall(u->general, args, nargsf, names);
}

static PyObject *usual_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"ledger", "name", "general", "of", NULL};
  PyObject *ledger, *general, *of = Py_None;
  const char *name;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!sO|O", names, &LedgerType, &ledger, &name, &general, &of)) return NULL;
  for (size_t i = 0; i < sizeof HOOKS / sizeof *HOOKS; i++) {
    if (strcmp(name, HOOKS[i].name)) continue;
    if (HOOKS[i].of != NULL && !PyObject_TypeCheck(of, HOOKS[i].of))
      return PyErr_Format(PyExc_TypeError, "%s: of %s, not %s", name, HOOKS[i].of->tp_name, Py_TYPE(of)->tp_name);
    Usual *u = PyObject_GC_New(Usual, type);
    if (u == NULL) return NULL;
    u->call = usual_call;
    u->ledger = (Ledger *)Py_NewRef(ledger);
    u->general = Py_NewRef(general);
    u->of = Py_NewRef(of);
    u->hook = HOOKS[i].hook;
    u->arguments = HOOKS[i].arguments;
    PyObject_GC_Track(u);
    return (PyObject *)u;
  }
  return PyErr_Format(PyExc_ValueError, "no hook '%s'", name);
}

static int usual_traverse(Usual *u, visitproc visit, void *arg) {
  Py_VISIT(u->ledger);
  Py_VISIT(u->general);
  Py_VISIT(u->of);
  return 0;
}

static int usual_clear(Usual *u) {
  /* it may yet be called, by a hook of torch's that is cleared later: `general` answers for all then, so it stays */
  return 0;
}

static void usual_dealloc(Usual *u) {
  PyObject_GC_UnTrack(u);
  Py_CLEAR(u->ledger);
  Py_CLEAR(u->general);
  Py_CLEAR(u->of);
  PyObject_GC_Del(u);
}

static PyTypeObject UsualType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "distdiag.recorder._hot.usual",
  .tp_doc = "usual(ledger, name, general, of=None): `general` as a callable, whose usual case is done here.",
  .tp_basicsize = sizeof(Usual),
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC,
  .tp_vectorcall_offset = offsetof(Usual, call),
  .tp_call = PyVectorcall_Call,
  .tp_new = usual_new,
  .tp_traverse = (traverseproc)usual_traverse,
  .tp_clear = (inquiry)usual_clear,
  .tp_dealloc = (destructor)usual_dealloc,
};

/* -- Ledger ------------------------------------------------------------------------------------------------------------ */

static int ledger_init(Ledger *s, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"words", "head", "ring", "records", "failed", "tensor", "float32", "strided", "grad_enabled",
                          NULL};
  PyObject *words, *failed, *tensor, *float32, *strided, *enabled;
  Py_ssize_t head, ring, records;
  if (s->view.obj != NULL) {
    PyErr_SetString(PyExc_TypeError, "a ledger is made once");
    return -1;
  }
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnnnOOOOO", names, &words, &head, &ring, &records, &failed, &tensor,
                                   &float32, &strided, &enabled))
    return -1;
  if (PyObject_GetBuffer(words, &s->view, PyBUF_WRITABLE) < 0) return -1;
  if (head < 0 || ring < 0 || records < 1 || head > s->view.len / 8 - LIFE - 1 ||
      ring > s->view.len / 8 - records * RECORD_WORDS) {
    PyErr_SetString(PyExc_ValueError, "the words do not lie in the page");
    return -1;
  }
  s->words = s->view.buf;
  s->head = s->words + head;
  s->ring = s->words + ring;
  s->records = (uint64_t)records;
  s->failed = Py_NewRef(failed);
  s->tensor = Py_NewRef(tensor);
  s->float32 = Py_NewRef(float32);
  s->strided = Py_NewRef(strided);
  s->grad_enabled = Py_NewRef(enabled);
  s->idle = 6; /* OTHER */
  s->always = 1;
  s->count_at = -1;
  s->step_start_ns = now_ns();
  s->models = PyDict_New();
  s->pending = PyList_New(0);
  s->later = PyList_New(0);
  return s->models == NULL || s->pending == NULL || s->later == NULL ? -1 : 0;
}

static int ledger_traverse(Ledger *s, visitproc visit, void *arg) {
  Py_VISIT(s->newest);
  Py_VISIT(s->lead);
  Py_VISIT(s->averaged_by);
  Py_VISIT(s->models);
  Py_VISIT(s->pending);
  Py_VISIT(s->later);
  Py_VISIT(s->failed);
  Py_VISIT(s->tensor);
  Py_VISIT(s->float32);
  Py_VISIT(s->strided);
  Py_VISIT(s->grad_enabled);
  return 0;
}

static int ledger_clear(Ledger *s) { /* what a hook needs to run at all stays */
  Py_CLEAR(s->newest);
  Py_CLEAR(s->lead);
  Py_CLEAR(s->averaged_by);
  return 0;
}

static void ledger_dealloc(Ledger *s) {
  PyObject_GC_UnTrack(s);
  ledger_clear(s);
  Py_CLEAR(s->models);
  Py_CLEAR(s->pending);
  Py_CLEAR(s->later);
  Py_CLEAR(s->failed);
  Py_CLEAR(s->tensor);
  Py_CLEAR(s->float32);
  Py_CLEAR(s->strided);
  Py_CLEAR(s->grad_enabled);
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
  if (began_of(time, &t) < 0) return NULL;
  close_step(s, t);
  begin_step(s, t);
  Py_RETURN_NONE;
}

static PyObject *ledger_begin(Ledger *s, PyObject *time) {
  uint64_t t;
  if (began_of(time, &t) < 0) return NULL;
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
  NUMBER(wait_ns), NUMBER(ready_ns), NUMBER(last_ready_ns), NUMBER(step_start_ns), NUMBER(samples), NUMBER(batch),
  NUMBER(optimizer_start_ns), NUMBER(reduced_elements), NUMBER(next_look), NUMBER(loader), NUMBER(batches_at),
  NUMBER(active_at), NUMBER(counted_site), SIGNED(count_at), SIGNED(bad_losses), SIGNED(lead_misses), TRUTH(always),
  TRUTH(trained), TRUTH(cuda), TRUTH(on_device), OBJECT(newest), OBJECT(lead), OBJECT(averaged_by), KEPT(models),
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
static PyTypeObject LedgerType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "distdiag.recorder._hot.Ledger",
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

/* -- Place, ModelWords, GradientWords: bases of classes in Python -------------------------------------------------------- */

static void place_dealloc(Place *p) {
  Py_CLEAR(p->code);
  Py_TYPE(p)->tp_free(p);
}

static PyMemberDef place_members[] = {
  {"code", T_OBJECT, offsetof(Place, code), 0, NULL},
  {"depth", T_LONG, offsetof(Place, depth), 0, NULL},
  {"instruction", T_LONG, offsetof(Place, instruction), 0, NULL},
  {"site", T_ULONGLONG, offsetof(Place, site), 0, NULL},
  {NULL},
};

static PyTypeObject PlaceType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "distdiag.recorder._hot.Place",
  .tp_basicsize = sizeof(Place),
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
  .tp_new = PyType_GenericNew,
  .tp_dealloc = (destructor)place_dealloc,
  .tp_members = place_members,
};

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

static PyTypeObject ModelWordsType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "distdiag.recorder._hot.ModelWords",
  .tp_basicsize = sizeof(ModelWords),
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
  .tp_new = PyType_GenericNew,
  .tp_dealloc = (destructor)model_dealloc,
  .tp_members = model_members,
};

static PyMemberDef gradient_members[] = {
  {"n", T_LONGLONG, offsetof(GradientWords, n), 0, NULL},
  {"stride", T_LONGLONG, offsetof(GradientWords, stride), 0, NULL},
  {"plain", T_BOOL, offsetof(GradientWords, plain), 0, NULL},
  {NULL},
};

static PyTypeObject GradientWordsType = {
  PyVarObject_HEAD_INIT(NULL, 0).tp_name = "distdiag.recorder._hot.GradientWords",
  .tp_basicsize = sizeof(GradientWords),
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
  .tp_new = PyType_GenericNew,
  .tp_members = gradient_members,
};

static struct PyModuleDef module = {
  PyModuleDef_HEAD_INIT, .m_name = "distdiag.recorder._hot", .m_doc = "The usual way of the hooks, in C; see hot.py.", .m_size = -1,
};

PyMODINIT_FUNC PyInit__hot(void) {
  static const struct { PyObject **at; const char *text; } texts[] = {
    {&s_shape, "shape"}, {&s_is_cpu, "is_cpu"}, {&s_grad, "grad"}, {&s_dtype, "dtype"},
    {&s_data_ptr, "data_ptr"}, {&s_layout, "layout"}, {&s_numel, "numel"}, {&s_is_contiguous, "is_contiguous"},
    {&s_sync, "require_backward_grad_sync"},
  };
  static const struct { PyTypeObject *type; const char *name; } types[] = {
    {&LedgerType, "Ledger"}, {&PlaceType, "Place"}, {&ModelWordsType, "ModelWords"},
    {&GradientWordsType, "GradientWords"}, {&UsualType, "usual"},
  };
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
    if ((*texts[i].at = PyUnicode_InternFromString(texts[i].text)) == NULL) return NULL;
  getframe = Py_XNewRef(PySys_GetObject("_getframe"));
  if (getframe == NULL) {
    PyErr_SetString(PyExc_ImportError, "this Python has no sys._getframe");
    return NULL;
  }
  PyObject *m = PyModule_Create(&module);
  if (m == NULL) return NULL;
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    if (PyType_Ready(types[i].type) < 0 || PyModule_AddObjectRef(m, types[i].name, (PyObject *)types[i].type) < 0) return NULL;
  if (PyModule_AddIntMacro(m, LAYOUT) < 0) return NULL;
  return m;
}
