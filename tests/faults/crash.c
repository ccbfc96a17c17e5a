/* Kills the process at the n-th change of a folder: loaded with LD_PRELOAD, armed from Python.

   Every libc call that changes what lies under the armed folder is counted. At the `at`-th the process
   dies by SIGKILL: before the call, after it, or, for writes, once half of the bytes are written. Files
   that were written since their last fsync are remembered, with what they held then, so that the caller
   can also act out a power failure. Only one folder at a time, in the process that called faults_arm
   and its threads. What goes to the kernel without libc (Rust's rustix) is not seen. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdio_ext.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum how { BEFORE, TORN, AFTER };

static char folder[PATH_MAX], shadow[PATH_MAX];
static size_t folder_length;
static long at, count;
static enum how how;
static int log_fd = -1, log_all;

#define MAX_DIRTY 65536
static pthread_mutex_t dirty_lock = PTHREAD_MUTEX_INITIALIZER;
static ino_t dirty[MAX_DIRTY];
static int n_dirty;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void say(const char *text, int length) {
    if (log_fd >= 0) syscall(SYS_write, log_fd, text, length);
}

/* -- which calls count ------------------------------------------------------------------------ */

static int under(const char *path) {
    return folder_length && !strncmp(path, folder, folder_length) &&
           (path[folder_length] == '/' || !path[folder_length]);
}

static int fd_path(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
    return under(path);
}

static int at_path(int dir, const char *name, char *path) {
    if (!folder_length || !name) return 0;
    char base[PATH_MAX];
    if (name[0] == '/') base[0] = 0;
    else if (dir == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; }
    else fd_path(dir, base);
    if (snprintf(path, PATH_MAX, "%s%s%s", base, base[0] ? "/" : "", name) >= PATH_MAX) return 0;
    return under(path);
}

/* -- dying ------------------------------------------------------------------------------------ */

static void die(void) {
    char line[64];
    pthread_mutex_lock(&dirty_lock);
    for (int i = 0; i < n_dirty; i++)
        say(line, snprintf(line, sizeof line, "dirty %lu\n", (unsigned long)dirty[i]));
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Whether this call is the one to die at. Calls die() itself unless the call has to be made first. */
static int fatal(const char *call, const char *path) {
    int saved = errno;
    long n = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (log_all || n == at) {
        char line[PATH_MAX + 64];
        say(line, snprintf(line, sizeof line, "%ld %s %s\n", n, call, path + folder_length));
    }
    if (n == at && how == BEFORE) die();
    errno = saved;
    return n == at;
}

/* -- what has not reached the disk ------------------------------------------------------------ */

static void shadow_of(ino_t inode, char *path) {
    snprintf(path, PATH_MAX, "%.4000s/%lu", shadow, (unsigned long)inode);
}

static void written(int fd) {
    struct stat status;
    if (!shadow[0] || fstat(fd, &status) || !S_ISREG(status.st_mode)) return;
    pthread_mutex_lock(&dirty_lock);
    int i = 0;
    while (i < n_dirty && dirty[i] != status.st_ino) i++;
    if (i == n_dirty && n_dirty < MAX_DIRTY) dirty[n_dirty++] = status.st_ino;
    pthread_mutex_unlock(&dirty_lock);
}

/* A new file may have the number of one that is gone: nothing of it is on the disk. */
static void created(int fd) {
    struct stat status;
    char path[PATH_MAX];
    if (!shadow[0] || fstat(fd, &status)) return;
    shadow_of(status.st_ino, path);
    syscall(SYS_unlinkat, AT_FDCWD, path, 0);
    written(fd);
}

static void synced(int fd) {
    struct stat status;
    char path[PATH_MAX], link[64], buffer[65536];
    if (!shadow[0] || fstat(fd, &status) || !S_ISREG(status.st_mode)) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    shadow_of(status.st_ino, path);
    pthread_mutex_lock(&dirty_lock);
    int in = syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC);
    int out = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ssize_t n;
    while (in >= 0 && out >= 0 && (n = syscall(SYS_read, in, buffer, sizeof buffer)) > 0)
        syscall(SYS_write, out, buffer, n);
    close(in), close(out);
    for (int i = 0; i < n_dirty; i++)
        if (dirty[i] == status.st_ino) { dirty[i] = dirty[--n_dirty]; break; }
    pthread_mutex_unlock(&dirty_lock);
}

/* -- for Python ------------------------------------------------------------------------------- */

/* `n` 0 only counts. `log` gets a line a call ("12 rename /path"), of all calls or of the last one,
   and what is dirty at the end. `copies` (may be "") is an empty folder, on the same machine. */
void faults_arm(const char *root, long n, int mode, int log, int all, const char *copies) {
    snprintf(folder, sizeof folder, "%s", root);
    snprintf(shadow, sizeof shadow, "%s", copies);
    at = n, how = mode, log_fd = log, log_all = all, count = 0, n_dirty = 0;
    folder_length = strlen(folder);
}

long faults_count(void) { return count; }

/* -- the calls -------------------------------------------------------------------------------- */

/* `half` is what a torn write does, `real` the whole call. */
#define WRITE(name, fd, half, real)                                  \
    char path[PATH_MAX];                                             \
    if (!folder_length || !fd_path(fd, path)) return real;           \
    int last = fatal(name, path);                                    \
    written(fd);                                                     \
    if (last && how == TORN) { half; die(); }                        \
    ssize_t result = real;                                           \
    if (last) die();                                                 \
    return result;

#define CHANGE(name, counts, real, then)                             \
    char path[PATH_MAX];                                             \
    if (!folder_length || !(counts)) return real;                    \
    int last = fatal(name, path);                                    \
    if (last && how == TORN) die();                                  \
    int result = real;                                               \
    int saved = errno;                                               \
    if (result >= 0) { then; }                                       \
    if (last) die();                                                 \
    errno = saved;                                                   \
    return result;

static ssize_t write_half(int fd, const struct iovec *v, int n, off_t offset, int placed) {
    for (int i = 0; i < n; i++) {
        size_t length = n == 1 ? v[i].iov_len / 2 : v[i].iov_len;
        if (n > 1 && i >= n / 2) break;
        if (placed) syscall(SYS_pwrite64, fd, v[i].iov_base, length, offset);
        else syscall(SYS_write, fd, v[i].iov_base, length);
        offset += length;
    }
    return 0;
}

ssize_t write(int fd, const void *b, size_t n) {
    WRITE("write", fd, syscall(SYS_write, fd, b, n / 2), REAL(write)(fd, b, n))
}
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) {
    WRITE("pwrite", fd, syscall(SYS_pwrite64, fd, b, n / 2, o), REAL(pwrite)(fd, b, n, o))
}
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) {
    WRITE("pwrite", fd, syscall(SYS_pwrite64, fd, b, n / 2, o), REAL(pwrite64)(fd, b, n, o))
}
ssize_t writev(int fd, const struct iovec *v, int n) {
    WRITE("writev", fd, write_half(fd, v, n, 0, 0), REAL(writev)(fd, v, n))
}
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t o) {
    WRITE("pwritev", fd, write_half(fd, v, n, o, 1), REAL(pwritev)(fd, v, n, o))
}
ssize_t pwritev64(int fd, const struct iovec *v, int n, off64_t o) {
    WRITE("pwritev", fd, write_half(fd, v, n, o, 1), REAL(pwritev64)(fd, v, n, o))
}
ssize_t copy_file_range(int in, off64_t *i, int fd, off64_t *o, size_t n, unsigned f) {
    WRITE("copy_file_range", fd, REAL(copy_file_range)(in, i, fd, o, n / 2, f),
          REAL(copy_file_range)(in, i, fd, o, n, f))
}

int ftruncate(int fd, off_t n) {
    CHANGE("ftruncate", fd_path(fd, path), REAL(ftruncate)(fd, n), written(fd))
}
int ftruncate64(int fd, off64_t n) {
    CHANGE("ftruncate", fd_path(fd, path), REAL(ftruncate64)(fd, n), written(fd))
}
int fallocate(int fd, int m, off_t o, off_t n) {
    CHANGE("fallocate", fd_path(fd, path), REAL(fallocate)(fd, m, o, n), written(fd))
}
int fallocate64(int fd, int m, off64_t o, off64_t n) {
    CHANGE("fallocate", fd_path(fd, path), REAL(fallocate64)(fd, m, o, n), written(fd))
}
int posix_fallocate(int fd, off_t o, off_t n) {
    CHANGE("posix_fallocate", fd_path(fd, path), REAL(posix_fallocate)(fd, o, n), written(fd))
}
int fsync(int fd) { CHANGE("fsync", fd_path(fd, path), REAL(fsync)(fd), synced(fd)) }
int fdatasync(int fd) { CHANGE("fdatasync", fd_path(fd, path), REAL(fdatasync)(fd), synced(fd)) }

int rename(const char *a, const char *b) {
    CHANGE("rename", at_path(AT_FDCWD, a, path) || at_path(AT_FDCWD, b, path), REAL(rename)(a, b), )
}
int renameat(int d, const char *a, int e, const char *b) {
    CHANGE("rename", at_path(d, a, path) || at_path(e, b, path), REAL(renameat)(d, a, e, b), )
}
int renameat2(int d, const char *a, int e, const char *b, unsigned f) {
    CHANGE("rename", at_path(d, a, path) || at_path(e, b, path), REAL(renameat2)(d, a, e, b, f), )
}
int link(const char *a, const char *b) {
    CHANGE("link", at_path(AT_FDCWD, b, path), REAL(link)(a, b), )
}
int linkat(int d, const char *a, int e, const char *b, int f) {
    CHANGE("link", at_path(e, b, path), REAL(linkat)(d, a, e, b, f), )
}
int symlink(const char *a, const char *b) {
    CHANGE("symlink", at_path(AT_FDCWD, b, path), REAL(symlink)(a, b), )
}
int unlink(const char *a) { CHANGE("unlink", at_path(AT_FDCWD, a, path), REAL(unlink)(a), ) }
int unlinkat(int d, const char *a, int f) {
    CHANGE("unlink", at_path(d, a, path), REAL(unlinkat)(d, a, f), )
}
int remove(const char *a) { CHANGE("unlink", at_path(AT_FDCWD, a, path), REAL(remove)(a), ) }
int rmdir(const char *a) { CHANGE("rmdir", at_path(AT_FDCWD, a, path), REAL(rmdir)(a), ) }
int mkdir(const char *a, mode_t m) {
    CHANGE("mkdir", at_path(AT_FDCWD, a, path), REAL(mkdir)(a, m), )
}
int mkdirat(int d, const char *a, mode_t m) {
    CHANGE("mkdir", at_path(d, a, path), REAL(mkdirat)(d, a, m), )
}
int truncate(const char *a, off_t n) {
    CHANGE("truncate", at_path(AT_FDCWD, a, path), REAL(truncate)(a, n), )
}
int truncate64(const char *a, off64_t n) {
    CHANGE("truncate", at_path(AT_FDCWD, a, path), REAL(truncate64)(a, n), )
}

/* Opening changes the folder only where it makes a file or empties one. */
static int makes(int dir, const char *name, int flags, char *path) {
    if (!(flags & (O_CREAT | O_TRUNC)) || !at_path(dir, name, path)) return 0;
    return (flags & O_TRUNC) || syscall(SYS_faccessat, AT_FDCWD, path, F_OK);
}

#define MODE                                                         \
    mode_t mode = 0;                                                 \
    if (flags & (O_CREAT | __O_TMPFILE)) {                           \
        va_list rest;                                                \
        va_start(rest, flags), mode = va_arg(rest, mode_t), va_end(rest); \
    }

int open(const char *a, int flags, ...) {
    MODE
    CHANGE("open", makes(AT_FDCWD, a, flags, path), REAL(open)(a, flags, mode), created(result))
}
int open64(const char *a, int flags, ...) {
    MODE
    CHANGE("open", makes(AT_FDCWD, a, flags, path), REAL(open64)(a, flags, mode), created(result))
}
int openat(int d, const char *a, int flags, ...) {
    MODE
    CHANGE("open", makes(d, a, flags, path), REAL(openat)(d, a, flags, mode), created(result))
}
int openat64(int d, const char *a, int flags, ...) {
    MODE
    CHANGE("open", makes(d, a, flags, path), REAL(openat64)(d, a, flags, mode), created(result))
}
int creat(const char *a, mode_t mode) {
    CHANGE("open", at_path(AT_FDCWD, a, path), REAL(creat)(a, mode), created(result))
}
int creat64(const char *a, mode_t mode) {
    CHANGE("open", at_path(AT_FDCWD, a, path), REAL(creat64)(a, mode), created(result))
}

/* Streams: hnswlib writes by them. What is in a buffer dies with the process, as it would. */
#define STREAM(name, type, counts, real)                             \
    char path[PATH_MAX];                                             \
    if (!folder_length || !(counts)) return real;                    \
    int last = fatal(name, path);                                    \
    if (last && how == TORN) die();                                  \
    type result = real;                                              \
    if (last) die();                                                 \
    return result;

static int flushes(FILE *file, char *path) {
    if (!file || !__fpending(file) || !fd_path(fileno(file), path)) return 0;
    written(fileno(file));
    return 1;
}

FILE *fopen(const char *a, const char *m) {
    STREAM("fopen", FILE *, m[0] != 'r' && at_path(AT_FDCWD, a, path), REAL(fopen)(a, m))
}
FILE *fopen64(const char *a, const char *m) {
    STREAM("fopen", FILE *, m[0] != 'r' && at_path(AT_FDCWD, a, path), REAL(fopen64)(a, m))
}
int fflush(FILE *f) { STREAM("fflush", int, flushes(f, path), REAL(fflush)(f)) }
int fclose(FILE *f) { STREAM("fclose", int, flushes(f, path), REAL(fclose)(f)) }
