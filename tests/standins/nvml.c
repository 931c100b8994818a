/* A libnvidia-ml.so.1 for machines without a GPU: nvidia-ml-py's own calls run against it.
 *
 * The file $FAKE_NVML has what the cards answer. It is read again at every call, one answer a line:
 *     count 2
 *     0.nvmlDeviceGetTemperature 41
 *     0/1.nvmlDeviceGetMemoryInfo 8589934592 1073741824      (MIG instance 1 of card 0: total, used)
 *     1.* E15                                                 (every call on card 1 returns error 15: lost)
 *     0.nvmlDeviceGetUtilizationRates S3000                   (the call takes three seconds, then fails)
 * A question without a line is NVML_ERROR_NOT_SUPPORTED. With -DOLD_DRIVER the newer symbols do not exist.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NOT_SUPPORTED 3
#define INSUFFICIENT_SIZE 7
#define TIMEOUT 10
typedef unsigned long long u64;
typedef struct { int card, instance; } device; /* instance -1: the card itself */

static device devices[8][9];
static int cards_seen;

static void *handle_of(int card, int instance) {
  device *d = &devices[card][instance + 1];
  d->card = card, d->instance = instance;
  return d;
}

/* The answer of `key` on `name`'s line: 0 and the text behind the key, or the error code to return. */
static int line_of(const char *name, const char *key, char *text, size_t size) {
  char line[512], want[128];
  FILE *f = fopen(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "/nonexistent", "r");
  int found = NOT_SUPPORTED;
  if (!f) return 9; /* driver not loaded */
  snprintf(want, sizeof want, "%s%s%s ", name, *name ? "." : "", key);
  while (fgets(line, sizeof line, f)) {
    if (strncmp(line, want, strlen(want))) continue;
    line[strcspn(line, "\n")] = 0;
    snprintf(text, size, "%s", line + strlen(want));
    found = 0;
    if (*text == 'E') found = atoi(text + 1);
    if (*text == 'S') fclose(f), usleep(1000 * atoi(text + 1)), f = NULL, found = 999;
    break;
  }
  if (f) fclose(f);
  return found;
}

static int answer(device *d, const char *key, char *text, size_t size) {
  char name[16], all[64];
  if (d->instance < 0) snprintf(name, sizeof name, "%d", d->card);
  else snprintf(name, sizeof name, "%d/%d", d->card, d->instance);
  int lost = line_of(name, "*", all, sizeof all);
  if (lost != NOT_SUPPORTED) return lost;
  return line_of(name, key, text, size);
}

static int numbers(device *d, const char *key, u64 *out, int n) {
  char text[256];
  int error = answer(d, key, text, sizeof text);
  char *at = text;
  for (int i = 0; !error && i < n; i++) out[i] = strtoull(at, &at, 0);
  return error;
}

static int number(device *d, const char *key, unsigned *out) {
  u64 v;
  int error = numbers(d, key, &v, 1);
  if (!error) *out = (unsigned)v;
  return error;
}

int nvmlInitWithFlags(unsigned flags) { char t[64]; (void)flags; return line_of("", "count", t, sizeof t); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : code == 9 ? "Driver Not Loaded" : "error"; }

int nvmlDeviceGetCount_v2(unsigned *out) {
  char text[64];
  int error = line_of("", "count", text, sizeof text);
  if (!error) *out = cards_seen = atoi(text);
  return error;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
  char text[64], name[16];
  snprintf(name, sizeof name, "%u", index);
  int error = line_of(name, "nvmlDeviceGetHandleByIndex", text, sizeof text);
  if (error && error != NOT_SUPPORTED) return error;
  *out = handle_of(index, -1);
  return 0;
}

#define NUMBER(f) int f(void *h, unsigned *out) { return number(h, #f, out); }
#define WIDE(f) int f(void *h, u64 *out) { return numbers(h, #f, out, 1); }
#define TEXT(f) int f(void *h, char *out, unsigned size) { return answer(h, #f, out, size); }
NUMBER(nvmlDeviceGetPowerUsage)
NUMBER(nvmlDeviceGetEnforcedPowerLimit)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth)
NUMBER(nvmlDeviceGetPersistenceMode)
NUMBER(nvmlDeviceGetMaxMigDeviceCount)
WIDE(nvmlDeviceGetCurrentClocksThrottleReasons)
TEXT(nvmlDeviceGetUUID)
TEXT(nvmlDeviceGetName)

int nvmlDeviceGetTemperature(void *h, int kind, unsigned *out) { (void)kind; return number(h, "nvmlDeviceGetTemperature", out); }
int nvmlDeviceGetClockInfo(void *h, int kind, unsigned *out) { (void)kind; return number(h, "nvmlDeviceGetClockInfo", out); }
int nvmlDeviceGetMaxClockInfo(void *h, int kind, unsigned *out) { (void)kind; return number(h, "nvmlDeviceGetMaxClockInfo", out); }
int nvmlDeviceGetTotalEccErrors(void *h, int a, int b, u64 *out) { (void)a, (void)b; return numbers(h, "nvmlDeviceGetTotalEccErrors", out, 1); }

int nvmlDeviceGetUtilizationRates(void *h, unsigned *out) {
  u64 v[2];
  int error = numbers(h, "nvmlDeviceGetUtilizationRates", v, 2);
  if (!error) out[0] = v[0], out[1] = v[1];
  return error;
}

int nvmlDeviceGetMemoryInfo(void *h, u64 *out) { /* total, free, used; the line says total, used */
  u64 v[2];
  int error = numbers(h, "nvmlDeviceGetMemoryInfo", v, 2);
  if (!error) out[0] = v[0], out[1] = v[0] - v[1], out[2] = v[1];
  return error;
}

int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *pending) {
  int error = number(h, "nvmlDeviceGetMigMode", now);
  if (!error) *pending = *now;
  return error;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned index, void **out) {
  device *d = h;
  char text[64], name[16];
  snprintf(name, sizeof name, "%d/%u", d->card, index);
  int error = line_of(name, "nvmlDeviceGetUUID", text, sizeof text);
  if (error) return 6; /* not found: no instance at this index */
  *out = handle_of(d->card, index);
  return 0;
}

int nvmlDeviceGetNvLinkState(void *h, unsigned link, unsigned *out) { /* the line says how many links there are, and how many are up */
  u64 v[2];
  int error = numbers(h, "nvmlDeviceGetNvLinkState", v, 2);
  if (!error && link >= v[0]) return 2; /* invalid argument */
  if (!error) *out = link < v[1];
  return error;
}

typedef struct { unsigned id, scope; long long stamp, latency; unsigned type; int status; union { double d; unsigned ui; unsigned long ul; u64 ull; long long sll; int si; unsigned short us; } value; } field;
int nvmlDeviceGetFieldValues(void *h, int n, field *values) {
  char key[32];
  for (int i = 0; i < n; i++) {
    u64 v;
    snprintf(key, sizeof key, "field%u", values[i].id);
    values[i].status = numbers(h, key, &v, 1);
    values[i].type = 3, values[i].value.ull = v;
    if (values[i].status == 15) return 15;
  }
  return 0;
}

int nvmlEventSetCreate(void **out) { static int set; *out = &set; return 0; }
int nvmlEventSetFree(void *set) { (void)set; return 0; }
int nvmlDeviceRegisterEvents(void *h, u64 kinds, void *set) { char t[64]; (void)kinds, (void)set; return answer(h, "nvmlDeviceRegisterEvents", t, sizeof t); }

#ifndef OLD_DRIVER
WIDE(nvmlDeviceGetCurrentClocksEventReasons)

typedef struct { void *device; u64 type, data; unsigned gi, ci; } event;
int nvmlEventSetWait_v2(void *set, event *out, unsigned timeout_ms) { /* one line `xid CARD NUMBER`, reported once */
  static char reported[64];
  char text[64];
  (void)set;
  if (timeout_ms) return 999; /* a monitor never waits for a card */
  if (line_of("", "xid", text, sizeof text) || !strcmp(text, reported)) return TIMEOUT;
  strcpy(reported, text);
  int card, xid;
  sscanf(text, "%d %d", &card, &xid);
  *out = (event){handle_of(card, -1), 8, xid, 0, 0};
  return 0;
}

typedef struct { unsigned pid; u64 memory; unsigned gi, ci; } process;
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, process *out) { /* the line lists process ids */
  char text[256];
  int error = answer(h, "nvmlDeviceGetComputeRunningProcesses", text, sizeof text), n = 0;
  if (error) return error;
  for (char *at = strtok(text, " "); at; at = strtok(NULL, " "), n++)
    if (out && n < (int)*count) out[n] = (process){atoi(at), 1 << 20, ~0u, ~0u};
  int fits = out || !n;
  *count = n;
  return fits ? 0 : INSUFFICIENT_SIZE;
}
#endif
