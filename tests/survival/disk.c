/* A disk that goes wrong while a process runs: preloaded (LD_PRELOAD), for files under $DISK_UNDER.

   The first byte of the file $DISK_CONTROL says how the disk is, at each call anew: 'r' read-only (EROFS),
   's' slow (50 ms a write), 'h' hung (a write does not return while it says so); anything else: well. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static const volatile char *control;
static const char *under;
static size_t length;

__attribute__((constructor)) static void begin(void) {
  const char *file = getenv("DISK_CONTROL");
  under = getenv("DISK_UNDER");
  if (!file || !under) return;
  length = strlen(under);
  int fd = open(file, O_RDONLY);
  if (fd < 0) return;
  void *mapped = mmap(NULL, 1, PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped != MAP_FAILED) control = mapped;
}

static int is_well(void) { return !control || (*control != 'r' && *control != 's' && *control != 'h'); }

static int is_ours(const char *path) {
  char whole[4096];
  if (path[0] != '/') {
    if (!getcwd(whole, sizeof whole / 2)) return 0;
    strncat(whole, "/", 2);
    strncat(whole, path, sizeof whole / 2);
    path = whole;
  }
  return strncmp(path, under, length) == 0;
}

static int is_ours_fd(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return is_ours(path);
}

static void delay(void) {
  if (*control == 's') usleep(50000);
  while (*control == 'h') usleep(50000);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Calls with a path that change the folder. */
#define CHANGE(type, name, params, args, path)            \
  type name params {                                      \
    if (!is_well() && is_ours(path)) {                    \
      delay();                                            \
      if (*control == 'r') { errno = EROFS; return -1; }  \
    }                                                     \
    return REAL(name) args;                               \
  }
CHANGE(int, mkdir, (const char *p, mode_t m), (p, m), p)
CHANGE(int, mkdirat, (int d, const char *p, mode_t m), (d, p, m), p)
CHANGE(int, rename, (const char *a, const char *b), (a, b), b)
CHANGE(int, renameat, (int d, const char *a, int e, const char *b), (d, a, e, b), b)
CHANGE(int, unlink, (const char *p), (p), p)
CHANGE(int, rmdir, (const char *p), (p), p)

/* Calls with a descriptor that write. A descriptor that was opened before goes on in a read-only system's
   place: the kernel would not remount one with open files, and fails their writes where the device fails. */
#define WRITE(type, name, params, args)                   \
  type name params {                                      \
    if (!is_well() && is_ours_fd(fd)) {                   \
      delay();                                            \
      if (*control == 'r') { errno = EROFS; return -1; }  \
    }                                                     \
    return REAL(name) args;                               \
  }
WRITE(ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n))
WRITE(ssize_t, pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o))
WRITE(ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o))
WRITE(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n))
WRITE(int, fsync, (int fd), (fd))
WRITE(int, fdatasync, (int fd), (fd))
WRITE(int, ftruncate, (int fd, off_t n), (fd, n))
WRITE(int, ftruncate64, (int fd, off64_t n), (fd, n))

#define OPEN(name, first, head, tail)                                                \
  int name(first const char *path, int flags, ...) {                                 \
    va_list rest;                                                                    \
    va_start(rest, flags);                                                           \
    mode_t mode = va_arg(rest, mode_t);                                              \
    va_end(rest);                                                                    \
    if (!is_well() && flags & (O_WRONLY | O_RDWR | O_CREAT) && is_ours(path)) {      \
      delay();                                                                       \
      if (*control == 'r') { errno = EROFS; return -1; }                             \
    }                                                                                \
    return ((int (*)(head const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(tail path, flags, mode); \
  }
#define COMMA ,
#define NOTHING
OPEN(open, NOTHING, NOTHING, NOTHING)
OPEN(open64, NOTHING, NOTHING, NOTHING)
OPEN(openat, int d COMMA, int COMMA, d COMMA)
OPEN(openat64, int d COMMA, int COMMA, d COMMA)
