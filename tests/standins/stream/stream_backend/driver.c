/* Three small libraries with the names and entry points of the real ones, so that native frames of a waiting host
 * read as on a GPU machine: libcudart -> libcuda for waits, libnccl for the creation of a communicator.
 * Built three times, with -DLIBCUDA, -DLIBCUDART and -DLIBNCCL. */
#include <sched.h>

struct wait {
  int (*done)(void*);
  void* of;
};

#ifdef LIBCUDA
/* A host that waits for its device spins (cudaDeviceScheduleAuto); it yields where there are more ranks than cores. */
static int spin(struct wait* w) {
  while (!w->done(w->of))
    sched_yield();
  return 0;
}
__attribute__((noinline)) int cuStreamSynchronize(struct wait* w) { int r = spin(w); __asm__ volatile(""); return r; }
__attribute__((noinline)) int cuLaunchKernel(struct wait* w) { int r = spin(w); __asm__ volatile(""); return r; }
#endif

#ifdef LIBCUDART
int cuStreamSynchronize(struct wait*);
int cuLaunchKernel(struct wait*);
__attribute__((noinline)) int cudaStreamSynchronize(struct wait* w) { int r = cuStreamSynchronize(w); __asm__ volatile(""); return r; }
/* blocks while the queue of launches is full */
__attribute__((noinline)) int cudaLaunchKernel(struct wait* w) { int r = cuLaunchKernel(w); __asm__ volatile(""); return r; }
#endif

#ifdef LIBNCCL
__attribute__((noinline)) int ncclCommInitRankConfig(struct wait* w) { int r = w->done(w->of); __asm__ volatile(""); return r; }
__attribute__((noinline)) int ncclCommSplit(struct wait* w) { int r = w->done(w->of); __asm__ volatile(""); return r; }
__attribute__((noinline)) int ncclCommFinalize(struct wait* w) { int r = w->done(w->of); __asm__ volatile(""); return r; }
#endif
