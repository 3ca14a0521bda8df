/* Makes system calls and says how they ended: NAME=ERRNO, 0 for success. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void show(const char *name, long rc) { printf("%s=%d\n", name, rc < 0 ? errno : 0); }
#define TRY(name, ...) show(#name, syscall(SYS_##name, __VA_ARGS__))

static void forked(const char *name, long flags) {
    long pid = syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
    if (pid == 0) _exit(0);
    show(name, pid);
    if (pid > 0) waitpid(pid, NULL, 0);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "ids") == 0) {
        printf("%d %d\n", (int)getuid(), (int)geteuid());
        return 0;
    }
    if (argc > 2 && strcmp(argv[1], "open") == 0) {
        show("open", open(argv[2], O_RDWR));
        return 0;
    }
    char buffer[256] = {0};
    TRY(mount, "none", "/tmp", "tmpfs", 0, 0);
    TRY(umount2, "/proc", 0);
    TRY(pivot_root, ".", ".");
    TRY(fsopen, "tmpfs", 0);
    TRY(open_tree, -100, "/", 1);
    TRY(keyctl, 0, -3, 0, 0, 0);
    TRY(add_key, "user", "x", "y", 1, -3);
    TRY(request_key, "user", "x", 0, -3);
    TRY(bpf, 0, buffer, sizeof buffer);
    TRY(perf_event_open, buffer, 0, -1, -1, 0);
    TRY(unshare, 0x10000000);
    TRY(setns, 0, 0);
    TRY(init_module, buffer, 1, "");
    TRY(kexec_load, 0, 0, 0, 0);
    TRY(reboot, 0xfee1dead, 672274793, 0x01234567, 0);
    TRY(swapon, "/tmp", 0);
    TRY(open_by_handle_at, 0, buffer, 0);
    TRY(userfaultfd, 1);
    TRY(io_uring_setup, 1, buffer);
    TRY(settimeofday, 0, 0);
    TRY(syslog, 10, 0, 0);
    TRY(quotactl, 0, 0, 0, 0);
    show("vsock", syscall(SYS_socket, 40, 1, 0));
    show("inet", syscall(SYS_socket, 2, 1, 0));
    show("norandom", syscall(SYS_personality, 0x0040000));
    show("personality", syscall(SYS_personality, 0xffffffffUL));
    forked("fork", 0);
    forked("clone_newuser", 0x10000000);
    forked("clone_newns", 0x20000);
    show("clone3", syscall(435, buffer, 64));
    show("future", syscall(1000));
    return 0;
}
