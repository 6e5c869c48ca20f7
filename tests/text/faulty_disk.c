// Preloaded into a process: its Nth call that changes a file below FAULTY_FOLDER fails, or ends the process.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static long calls, at = -1;  // `at` -1: count only
static int error;            // ENOSPC: from the Nth call on; another number: that call alone; 0: the process is killed

void arm(long nth, int number) { calls = 0; at = nth; error = number; }
long count(void) { return calls; }

static int below(const char *path) {
    const char *folder = getenv("FAULTY_FOLDER");
    return folder && path && strstr(path, folder);
}

static int fails(int concerned) {
    if (!concerned) return 0;
    calls++;
    if (at < 0 || calls < at || (calls > at && error != ENOSPC)) return 0;
    if (!error) raise(SIGKILL);
    errno = error;
    return 1;
}

static int descriptor_below(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name)                                                              \
    int name(const char *path, int flags, ...) {                                \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if ((flags & O_CREAT) && fails(below(path))) return -1;                 \
        return REAL(name)(path, flags, mode);                                   \
    }
OPEN(open)
OPEN(open64)
FILE *fopen64(const char *path, const char *mode) { return fails(mode[0] != 'r' && below(path)) ? NULL : REAL(fopen64)(path, mode); }
ssize_t write(int file, const void *data, size_t size) { return fails(descriptor_below(file)) ? -1 : REAL(write)(file, data, size); }
size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
    return fails(descriptor_below(fileno(file))) ? 0 : REAL(fwrite)(data, size, count, file);
}
int fsync(int file) { return fails(descriptor_below(file)) ? -1 : REAL(fsync)(file); }
int mkdir(const char *path, mode_t mode) { return fails(below(path)) ? -1 : REAL(mkdir)(path, mode); }
int rename(const char *from, const char *to) { return fails(below(to)) ? -1 : REAL(rename)(from, to); }
