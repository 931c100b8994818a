/* The fast path of every step's hooks, in C: what accounts.py and hooks/step.py do in Python.

   Each hook is a `fast_hook` object around a Python function that handles every case. The C code handles the common case, after it
   has checked every condition for it; otherwise it writes nothing and calls the Python function. Between two hooks a step's
   computation empties the caches, and then a Python function costs ten times what it costs in a loop.

   Nothing here may raise into the job: an error is passed to `failed`, which counts it. Compiled at install if there is a C
   compiler; not loaded by a Python without the GIL, which serialises the threads here. */

#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

/* What the C code assumes about the page. The module exports all of it, and accounts.py compares it with layout.py. */
enum { PHASE, SINCE, BLOCKED, BLOCKED_AT, BLOCKED_SITE, BLOCKED_SINCE, STEP, MICRO_STEPS, N_STEPS, N_CALLS, EPOCH,
       DEVICE_BYTES, LIFE };                                           /* words of the header, from `phase` on */
enum { DATA = 1, FORWARD = 3, BACKWARD = 4, OPTIMIZER = 5, OTHER = 6, VALIDATE = 9 }; /* layout.Phase */
enum { IN_DDP = 2 };                                                   /* layout.Blocked */
enum { STARTING, RUNNING };                                            /* layout.LifeWord */
enum { FINGERPRINTS = 6 };
#define RECORD_FIELDS(X)                                                                                             \
  X(number) X(step) X(epoch) X(start_ns) X(end_ns) X(data_ns) X(h2d_ns) X(forward_ns) X(backward_ns) X(optimizer_ns) \
  X(wait_ns) X(ready_ns) X(samples) X(batch) X(loss) X(loss_known) X(device_bytes) X(forward_wait_ns) X(arrived_ns) \
  X(optimizer_wait_ns) X(elements)
#define RECORD_INDEX(field) R_##field,
enum { RECORD_FIELDS(RECORD_INDEX) RECORD_WORDS };                     /* words of layout.StepRecord */

typedef unsigned long long ull;
typedef struct {
  PyObject_HEAD
  Py_buffer view;
  volatile uint64_t *words, *head, *ring; /* the page, its header from `phase` on, its step records */
  uint64_t records, n_words;
  ull main_thread, idle, data_ns, forward_ns, backward_ns, optimizer_ns, wait_ns, ready_ns, last_ready_ns;
  ull forward_wait_ns, arrived_ns, optimizer_wait_ns;
  ull step_start_ns, samples, batch, elements, optimizer_start_ns, reduced_elements, next_event, loader, batches_at;
  ull counted_site;
  long long count_at, bad_losses, lead_misses;
  double loss;
  char loss_known, always, trained, cuda, on_device;
  PyObject *newest, *entered, *lead, *averaged_by;
  PyObject *models, *pending, *later;                        /* dict, list, list */
  PyObject *failed, *tensor, *float32, *strided, *grad_enabled;
  PyObject *function_modes, *dispatch_modes, *unseen;        /* counts of active modes; class of the context without them */
} Ledger;

typedef struct {
  PyObject_HEAD
  PyObject *code;
  long depth, instruction;
  ull site;
} CallFrame;

typedef struct {
  PyObject_HEAD
  PyObject *ref;      /* weak, of the DDP module */
  PyObject *forward;  /* a CallFrame */
  long long group_at, forward_count;
  ull forwards_at, synced_at, forward_site;
} ModelWords;

typedef struct {
  PyObject_HEAD
  long long n, stride;
  char plain;
} GradientWords;

typedef struct FastHook FastHook;
typedef int (*Hook)(Ledger *, FastHook *, PyObject *const *, PyObject **);
struct FastHook {
  PyObject_HEAD
  vectorcallfunc call;
  Ledger *ledger;
  PyObject *slow, *of;
  Hook hook;
  Py_ssize_t arguments;
  int reads;
};

extern PyTypeObject LedgerType, CallFrameType, ModelWordsType, GradientWordsType, FastHookType;

typedef struct {
  const char *name;
  Hook hook;
  Py_ssize_t arguments;
  PyTypeObject *of; /* type of the object that it reads; NULL: only the ledger */
  int reads;        /* the C code reads a tensor: not while a mode would see it */
} NamedHook;
extern const NamedHook HOOKS[];
extern const size_t N_HOOKS;

int intern_names(void); /* once, before any hook; -1 with an error */

/* Write the record of the step that ends at `t`; begin the next one. */
void close_step(Ledger *s, uint64_t t);
void begin_step(Ledger *s, uint64_t t);

static inline uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* 1 if an index that Python set is inside the page. If not, the Python function raises, which is counted. */
static inline int in_page(const Ledger *s, uint64_t index) { return index < s->n_words; }

/* Read a time argument. */
static inline int time_of(PyObject *argument, uint64_t *t) {
  *t = PyLong_AsUnsignedLongLong(argument);
  return *t == (uint64_t)-1 && PyErr_Occurred() ? -1 : 1;
}
