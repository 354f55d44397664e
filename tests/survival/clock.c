/* The clock of the day jumps while a Python program runs: preloaded (LD_PRELOAD).

   The file $CLOCK_CONTROL holds an int64: seconds that Python's clock of the day is ahead, read at each call.
   Only calls from the interpreter are told so. Others wait until a time of that clock, and the kernel, which
   counts these waits, knows nothing of the jump. (libfaketime 0.9.10 moves Python's sleeps and waits too:
   they fail, or never end.) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead;
static uintptr_t interpreter, low, high;

static int find(struct dl_phdr_info *info, size_t size, void *unused) {
  uintptr_t first = UINTPTR_MAX, last = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = start + info->dlpi_phdr[i].p_memsz;
    if (start < first) first = start;
    if (end > last) last = end;
  }
  if (interpreter < first || interpreter >= last) return 0;
  low = first;
  high = last;
  return 1;
}

__attribute__((constructor)) static void begin(void) {
  const char *file = getenv("CLOCK_CONTROL");
  interpreter = (uintptr_t)dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  if (!file || !interpreter) return;
  dl_iterate_phdr(find, NULL);
  int fd = open(file, O_RDONLY);
  if (fd < 0) return;
  void *mapped = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped != MAP_FAILED) ahead = mapped;
}

static int64_t jump(const void *caller) {
  return ahead && (uintptr_t)caller >= low && (uintptr_t)caller < high ? *ahead : 0;
}

int clock_gettime(clockid_t which, struct timespec *found) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(which, found);
  if (!failed && which == CLOCK_REALTIME) found->tv_sec += jump(__builtin_return_address(0));
  return failed;
}

time_t time(time_t *found) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  now.tv_sec += jump(__builtin_return_address(0));
  if (found) *found = now.tv_sec;
  return now.tv_sec;
}
