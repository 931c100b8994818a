/* The fast path of a step's hooks; see hot.h. */

#include "hot.h"

static PyObject *getframe, *s_shape, *s_is_cpu, *s_grad, *s_dtype, *s_data_ptr, *s_sync, *s_layout, *s_numel, *s_is_contiguous;

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

/* Return a new reference to a weak reference's object; NULL without an error if it is gone. */
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

/* 1 if the user calls from the last site, at the same distance from our frame. */
static int same_call_frame(CallFrame *p) {
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

static ModelWords *model_of(Ledger *s, PyObject *module) { /* borrowed; NULL if unknown, or with an error */
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

void close_step(Ledger *s, uint64_t t) {
  volatile uint64_t *h = s->head;
  uint64_t ready = s->ready_ns ? s->ready_ns : s->last_ready_ns;
  uint64_t number = h[N_STEPS] + 1, step = h[STEP] + 1;
  volatile uint64_t *w = s->ring + (number - 1) % s->records * RECORD_WORDS;
  union { double d; uint64_t u; } loss = {.d = s->loss};
  w[R_number] = 0; /* a half-written record is recognised */
  __atomic_thread_fence(__ATOMIC_RELEASE);
  w[R_step] = step;
  w[R_epoch] = h[EPOCH];
  w[R_start_ns] = s->step_start_ns;
  w[R_end_ns] = t;
  w[R_data_ns] = s->data_ns;
  w[R_h2d_ns] = 0;
  w[R_forward_ns] = s->forward_ns;
  w[R_backward_ns] = s->backward_ns;
  w[R_optimizer_ns] = s->optimizer_ns;
  w[R_wait_ns] = s->wait_ns;
  w[R_ready_ns] = ready > s->step_start_ns ? ready : 0;
  w[R_samples] = s->samples;
  w[R_batch] = s->batch;
  if (s->loss_known) w[R_loss] = loss.u;
  w[R_loss_known] = (uint64_t)s->loss_known;
  w[R_device_bytes] = h[DEVICE_BYTES];
  w[R_forward_wait_ns] = s->forward_wait_ns;
  w[R_arrived_ns] = s->arrived_ns;
  w[R_optimizer_wait_ns] = s->optimizer_wait_ns;
  w[R_elements] = s->elements;
  __atomic_store_n(w, number, __ATOMIC_RELEASE);
  __atomic_store_n(h + N_STEPS, number, __ATOMIC_RELEASE);
  h[STEP] = step;
}

void begin_step(Ledger *s, uint64_t t) {
  s->step_start_ns = t;
  s->data_ns = s->forward_ns = s->backward_ns = s->optimizer_ns = s->wait_ns = s->ready_ns = 0;
  s->forward_wait_ns = s->arrived_ns = s->optimizer_wait_ns = 0;
  s->samples = s->batch = s->elements = 0;
  s->loss_known = 0;
  if (s->head[LIFE] == STARTING) s->head[LIFE] = RUNNING;
}

/* -- the hooks: 1 done, with its result; 0 not the common case, nothing done; -1 an error ----------------------------------- */

static int begins(uint64_t t, PyObject **result) { return (*result = PyLong_FromUnsignedLongLong(t)) == NULL ? -1 : 1; }

static int done(PyObject **result) {
  *result = Py_NewRef(Py_None);
  return 1;
}

static int data_begins(Ledger *s, FastHook *u, PyObject *const *args, PyObject **result) {
  return begins(elsewhere(s) ? 0 : enter(s, DATA), result);
}

static int data_ends(Ledger *s, FastHook *u, PyObject *const *args, PyObject **result) { /* iterator, batch, began */
  uint64_t began;
  PyObject *batch = args[1];
  if (s->loader == 0 || s->loader != (ull)(uintptr_t)args[0]) return 0;
  if (!in_page(s, s->batches_at) || s->words[s->batches_at] < FINGERPRINTS) return 0;
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
  ull n = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, 0)), elements = n;
  for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(shape); i++)
    elements *= PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, i));
  Py_DECREF(shape);
  if (PyErr_Occurred()) return -1;
  PyObject *newest = PyWeakref_NewRef(x, NULL);
  if (newest == NULL || time_of(args[2], &began) < 0) {
    Py_XDECREF(newest);
    return -1;
  }
  uint64_t t = enter(s, s->idle);
  s->data_ns += t - began;
  s->words[s->batches_at] += 1;
  if (in_page(s, s->batches_at + 2)) { /* given, elements */
    s->words[s->batches_at + 1] += 1;
    s->words[s->batches_at + 2] += elements;
  }
  s->samples += n;
  s->elements += elements;
  if (s->batch == 0) s->batch = n;
  Py_XSETREF(s->newest, newest);
  return done(result);
}

/* 1 if a DDP module is not in no_sync(). */
static int averages(PyObject *module) {
  PyObject *sync = PyObject_GetAttr(module, s_sync);
  int r = sync == NULL ? -1 : PyObject_IsTrue(sync);
  Py_XDECREF(sync);
  return r;
}

/* Return the time, made odd if gradients are enabled and even if not (by a nanosecond). 0: not recorded. */
static int forward_begins(Ledger *s, FastHook *u, PyObject *const *args, PyObject **result) { /* module, inputs */
  if (elsewhere(s) || s->cuda || PyList_GET_SIZE(s->later)) return 0;
  ModelWords *m = model_of(s, args[0]);
  if (m == NULL) return PyErr_Occurred() ? -1 : 0;
  if (m->forward_count < 0 || m->forward == NULL || !PyObject_TypeCheck(m->forward, &CallFrameType)) return 0;
  if (!in_page(s, (uint64_t)m->forward_count) || !in_page(s, m->forwards_at)) return 0;
  int training = grad_enabled(s);
  if (training < 0) return -1;
  uint64_t n = s->words[m->forwards_at];
  if (training && ((n & (n - 1)) == 0 || s->batch == 0)) return 0; /* in few forwards, its input is looked at */
  CallFrame *p = (CallFrame *)m->forward;
  int same = p->site == m->forward_site ? same_call_frame(p) : 0;
  if (same < 1) return same;
  int first = training && s->forward_ns == 0 && PyTuple_CheckExact(args[1]) && PyTuple_GET_SIZE(args[1]);
  PyObject *x = first ? PyTuple_GET_ITEM(args[1], 0) : NULL;
  if (x != NULL && (PyObject *)Py_TYPE(x) == s->tensor) {
    PyObject *entered = PyWeakref_NewRef(x, NULL);
    if (entered == NULL) return -1;
    Py_XSETREF(s->entered, entered);
  }
  s->words[m->forward_count] += 1;
  if (training) s->words[m->forwards_at] += 1;
  uint64_t t = enter(s, training ? FORWARD : VALIDATE);
  return begins(training ? t | 1 : t & ~(uint64_t)1, result);
}

static int forward_ends(Ledger *s, FastHook *u, PyObject *const *args, PyObject **result) { /* module, began */
  uint64_t began;
  if (s->on_device) return 0;
  if (time_of(args[1], &began) < 0) return -1;
  ModelWords *m = model_of(s, args[0]);
  if (m == NULL) return PyErr_Occurred() ? -1 : 0;
  int training = began & 1;
  if (training) {
    if (!in_page(s, m->forwards_at) || s->words[m->forwards_at] == 1) return 0; /* the first one was watched */
    int expected = averages(args[0]), there = !expected; /* DDP decides here, not in backward, whether it averages */
    if (expected < 0) return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(s->pending); i++) there |= PyList_GET_ITEM(s->pending, i) == (PyObject *)m;
    if (!there && PyList_Append(s->pending, (PyObject *)m) < 0) return -1;
  }
  s->head[PHASE] = s->idle;
  s->head[BLOCKED] = 0;
  uint64_t t = s->head[SINCE] = now_ns();
  if (training) s->forward_ns += t - began;
  return done(result);
}

static int sync_begins(Ledger *s, FastHook *u, PyObject *const *args, PyObject **result) { /* module */
  if (elsewhere(s)) return begins(0, result);
  ModelWords *m = model_of(s, args[0]);
  if (m == NULL && PyErr_Occurred()) return -1;
  if (m == NULL || m->group_at < 0) return begins(0, result);
  block(s, (uint64_t)m->group_at, m->forward_site);
  if (s->arrived_ns == 0) s->arrived_ns = s->head[BLOCKED_SINCE];
  return begins(s->head[BLOCKED_SINCE], result);
}

static int sync_ends(Ledger *s, FastHook *u, PyObject *const *args, PyObject **result) { /* began, … */
  uint64_t began;
  if (args[0] == Py_None) return done(result);
  if (time_of(args[0], &began) < 0) return -1;
  if (began == 0) return done(result);
  s->head[BLOCKED] = 0;
  uint64_t waited = now_ns() - began;
  s->wait_ns += waited;
  if (s->head[PHASE] == FORWARD) s->forward_wait_ns += waited; /* a validation is not in forward_ns */
  return done(result);
}

/* 1 if an attribute is this object. */
static int is(PyObject *of, PyObject *name, PyObject *what) {
  PyObject *found = PyObject_GetAttr(of, name);
  Py_XDECREF(found); /* only to be compared */
  return found == NULL ? -1 : found == what;
}

/* Return the address of a tensor's elements; 0 without an error if it has no memory of its own. */
static ull address_of(PyObject *t) {
  PyObject *at = PyObject_CallMethodNoArgs(t, s_data_ptr);
  ull address = at == NULL ? 0 : PyLong_AsUnsignedLongLong(at);
  Py_XDECREF(at);
  PyErr_Clear();
  return address;
}

/* Read a loss of the common kind: one finite float32 on the CPU. Reads memory directly: asking torch takes three times as long. */
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
  return *value - *value == 0.0; /* NaN if it is not finite */
}

static int backward_begins(Ledger *s, FastHook *u, PyObject *const *args, PyObject **result) { /* tensors */
  if (elsewhere(s) || s->on_device || !s->trained || s->reduced_elements) return 0;
  Py_ssize_t waiting = PyList_GET_SIZE(s->pending);
  if (waiting > 1) return 0;
  CallFrame *p = (CallFrame *)u->of;
  int same = same_call_frame(p);
  if (same < 1) return same;
  ModelWords *m = NULL;
  if (waiting) {
    PyObject *first = PyList_GET_ITEM(s->pending, 0);
    if (!PyObject_TypeCheck(first, &ModelWordsType)) return 0;
    PyObject *module = alive(((ModelWords *)first)->ref);
    if (module == NULL) return 0;
    int expected = averages(module);
    Py_DECREF(module);
    if (expected < 1) return expected; /* in vain in no_sync() */
    m = (ModelWords *)first;
    if (p->site != s->counted_site || s->count_at < 0) return 0;
    if (!in_page(s, (uint64_t)s->count_at) || !in_page(s, m->synced_at)) return 0;
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

static int backward_ends(Ledger *s, FastHook *u, PyObject *const *args, PyObject **result) { /* began */
  uint64_t began;
  if (s->on_device) return 0;
  if (time_of(args[0], &began) < 0) return -1;
  s->head[PHASE] = s->idle;
  s->head[BLOCKED] = 0;
  uint64_t t = s->head[SINCE] = now_ns();
  s->backward_ns += t - began;
  if (s->ready_ns > began) s->wait_ns += t - s->ready_ns;
  return done(result);
}

static int has_elements(PyObject *t, long long wanted) {
  PyObject *n = PyObject_CallMethodNoArgs(t, s_numel);
  long long elements = n == NULL ? -1 : PyLong_AsLongLong(n);
  Py_XDECREF(n);
  return PyErr_Occurred() ? -1 : elements == wanted;
}

/* 1 if a tensor is contiguous in the CPU's memory. */
static int dense_in_memory(PyObject *g) {
  int r = is(g, s_is_cpu, Py_True);
  if (r < 1) return r;
  PyObject *dense = PyObject_CallMethodNoArgs(g, s_is_contiguous);
  Py_XDECREF(dense);
  return dense == NULL ? -1 : dense == Py_True;
}

static int gradient_is_ready(Ledger *s, FastHook *u, PyObject *const *args, PyObject **result) { /* parameter */
  GradientWords *w = (GradientWords *)u->of;
  s->ready_ns = now_ns();
  if (!w->plain || w->stride < 1) return 0;
  PyObject *g = PyObject_GetAttr(args[0], s_grad);
  if (g == NULL) return -1;
  double total = 0;
  int fits = (PyObject *)Py_TYPE(g) == s->tensor;
  if (fits) fits = is(g, s_layout, s->strided);
  if (fits > 0) fits = is(g, s_dtype, s->float32);
  if (fits > 0) fits = has_elements(g, w->n);
  if (fits > 0) {
    ull address = address_of(g);
    fits = address != 0;
    if (fits) fits = dense_in_memory(g); /* each time: another tensor may have the address of the last */
    if (fits > 0)
      for (long long i = 0; i < w->n; i += w->stride) total += ((const float *)(uintptr_t)address)[i];
  }
  Py_DECREF(g);
  return fits > 0 ? (total - total == 0.0 ? done(result) : 0) : fits;
}

static int optimizer_begins(Ledger *s, FastHook *u, PyObject *const *args, PyObject **result) {
  if (elsewhere(s)) return done(result);
  if (s->on_device || s->always || s->reduced_elements || s->head[STEP] + 1 >= s->next_event) return 0;
  s->optimizer_start_ns = enter(s, OPTIMIZER);
  return done(result);
}

static int optimizer_ends(Ledger *s, FastHook *u, PyObject *const *args, PyObject **result) { /* optimizer, … */
  if (elsewhere(s)) return done(result);
  uint64_t step = s->head[STEP] + 1;
  if (s->optimizer_start_ns == 0 || s->on_device || step < 64 || (step & (step < 256 ? 31 : 63)) == 0) return 0; /* a checksum step is possible */
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

const NamedHook HOOKS[] = {
  {"data_begins", data_begins, 1, NULL, 0}, {"data_ends", data_ends, 3, NULL, 1},
  {"forward_begins", forward_begins, 2, NULL, 0}, {"forward_ends", forward_ends, 2, NULL, 0},
  {"sync_begins", sync_begins, 1, NULL, 0}, {"sync_ends", sync_ends, 3, NULL, 0},
  {"backward_begins", backward_begins, 1, &CallFrameType, 1}, {"backward_ends", backward_ends, 1, NULL, 0},
  {"gradient_is_ready", gradient_is_ready, 1, &GradientWordsType, 1},
  {"optimizer_begins", optimizer_begins, 3, NULL, 0}, {"optimizer_ends", optimizer_ends, 3, NULL, 0},
};

const size_t N_HOOKS = sizeof HOOKS / sizeof *HOOKS;

int intern_names(void) {
  static const struct { PyObject **at; const char *text; } names[] = {
    {&s_shape, "shape"}, {&s_is_cpu, "is_cpu"}, {&s_grad, "grad"}, {&s_dtype, "dtype"}, {&s_data_ptr, "data_ptr"},
    {&s_layout, "layout"}, {&s_numel, "numel"}, {&s_is_contiguous, "is_contiguous"}, {&s_sync, "require_backward_grad_sync"},
  };
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if ((*names[i].at = PyUnicode_InternFromString(names[i].text)) == NULL) return -1;
  getframe = Py_XNewRef(PySys_GetObject("_getframe"));
  if (getframe != NULL) return 0;
  PyErr_SetString(PyExc_ImportError, "this Python has no sys._getframe");
  return -1;
}
