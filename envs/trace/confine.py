"""The inside of the sandbox: this process locks itself in, then executes the program it is given.

Imported by the bare interpreter that ``interpreter.py`` starts. It uses the standard library only and imports as little
as possible, because every program pays for the imports. Every step only takes rights away, and none is undone.

Left out on purpose: system call filters for machines other than x86-64 and 64-bit ARM (there ``seccomp`` is
reported as unavailable), and helpers such as bubblewrap (the same system calls, one more dependency).
"""

import _signal
import ctypes
import os
import resource
import sys

libc = ctypes.CDLL(None, use_errno=True)
NOBODY, SIGKILL, SIGTERM = 65534, 9, 15
READY = b"+"  # first byte of the output, written once locked in; everything after it is the program's
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
NEW_USER, NEW_MOUNTS, NEW_PID_NET_IPC_UTS = 0x10000000, 0x00020000, 0x6C000000  # CLONE_NEW* of linux/sched.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

# Landlock rights (linux/landlock.h).
READ_FILE, READ_DIR, WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
SCRATCH_RIGHTS = (
    READ_FILE | READ_DIR | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SYM | REFER | TRUNCATE
)

# Every system call a program may make, as (x86-64, 64-bit ARM) numbers; None where the machine has no such call.
# All others fail with ENOSYS: no sockets, no new processes, no exec, no ptrace, mount, bpf, io_uring, keys, chmod.
# fmt: off
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24), "fstat": (5, 80), "newfstatat": (262, 79), "stat": (4, None), "lstat": (6, None),
    "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "lseek": (8, 62), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "symlink": (88, None), "symlinkat": (266, 36),
    "ftruncate": (77, 46), "fsync": (74, 82), "fdatasync": (75, 83), "umask": (95, 166), "sendfile": (40, 71),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "brk": (12, 214),
    "madvise": (28, 233), "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293),
    "sigaltstack": (131, 132), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigtimedwait": (128, 137), "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133), "pause": (34, None),
    "gettid": (186, 178), "getpid": (39, 172), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrandom": (318, 278),
    "uname": (63, 160), "sysinfo": (99, 179), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "getrlimit": (97, 163), "getrusage": (98, 165), "exit": (60, 93), "exit_group": (231, 94),
    "wait4": (61, 260), "waitid": (247, 95), "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None),
    "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_create": (213, None), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19), "sendto": (44, 206), "recvfrom": (45, 207), "shutdown": (48, 210), "alarm": (37, None),
    "setitimer": (38, 103), "getitimer": (36, 102), "arch_prctl": (158, None), "set_tid_address": (218, 96),
    "restart_syscall": (219, 128), "membarrier": (324, 283), "getcpu": (309, 168),
}
# fmt: on
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, column of the tables


def restricted(pid: int) -> dict:
    """Return the calls allowed for some arguments only: name -> (numbers, [(argument, mask, allowed values), ...]).

    All conditions of a call must hold.
    """
    readable_open = (0, 1, 2, 0o1001, 0o1002)  # access modes, O_TRUNC only with write access (older Landlock needs it)
    return {
        "open": ((2, None), [(1, 0o1003, readable_open)]),
        "openat": ((257, 56), [(2, 0o1003, readable_open)]),
        "clone": ((56, 220), [(0, 0x00010000, (0x00010000,))]),  # CLONE_THREAD: threads, never processes
        "kill": ((62, 129), [(0, None, (pid,))]),
        "tgkill": ((234, 131), [(0, None, (pid,))]),
        "prlimit64": ((302, 261), [(0, None, (0,))]),
        "prctl": ((157, 167), [(0, None, (15, 16))]),  # PR_SET_NAME, PR_GET_NAME
        "fcntl": ((72, 25), [(1, None, (0, 1, 2, 3, 4, 1030))]),  # duplicate and flags; no owner, lease, pipe size
        # Questions about terminals, FIONREAD, FIONBIO, and the close-on-exec flag.
        "ioctl": ((16, 29), [(1, None, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))]),
        "socketpair": ((53, 199), [(0, None, (1,)), (1, 0xF, (1,))]),  # a private AF_UNIX stream: asyncio needs it
    }


def check(result: int, what: str) -> int:
    """Return the result of a libc call; OSError that names ``what`` if it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def prctl(option: int, value: int, pointer: object = 0) -> None:
    """Call ``prctl(2)``; OSError if it fails."""
    check(libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), f"prctl {option}")


def readable_paths() -> list[str]:
    """Return the directories of the standard library and of the system's shared libraries, each once."""
    wanted = [os.path.join(sys.base_prefix, "lib"), "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    return [path for path in dict.fromkeys(wanted) if os.path.isdir(path)]


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call ``mount(2)``; OSError that names the target if it fails."""
    args = [None if part is None else part.encode() for part in (source, target, kind, data)]
    check(libc.mount(args[0], args[1], args[2], ctypes.c_ulong(flags), args[3]), f"mount {target}")


def new_root(scratch_bytes: int) -> None:
    """Replace the root by a small tmpfs that holds the standard library, shared libraries, devices and ``/tmp``."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    handles = {path: os.open(path, os.O_PATH) for path in [*readable_paths(), *DEVICES] if os.path.exists(path)}
    mount("sandbox", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={scratch_bytes},nr_inodes=4096,mode=755")
    for path, handle in handles.items():
        target = "/tmp" + path
        if path in DEVICES:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "w").close()
            mount(f"/proc/self/fd/{handle}", target, None, MS_BIND)
        else:
            os.makedirs(target, exist_ok=True)
            mount(f"/proc/self/fd/{handle}", target, None, MS_BIND | MS_REC)
            kept = os.statvfs(target).f_flag & 0xC0E  # a remount must keep nosuid, nodev, noexec, noatime, nodiratime
            mount("none", target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | kept)
        os.close(handle)
    os.makedirs("/tmp/tmp", exist_ok=True)  # exists already if Python is installed below /tmp
    os.chmod("/tmp/tmp", 0o777)
    os.chdir("/tmp")
    check(libc.pivot_root(b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/tmp")


def enter_user_namespace(extra: int, own_proc: int) -> None:
    """Enter a user namespace in which this process is ``nobody``, with rights over its own namespaces only."""
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(NEW_USER | extra), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        handle = os.open(name, os.O_WRONLY, dir_fd=own_proc)
        os.write(handle, text.encode())
        os.close(handle)


def become_nobody() -> None:
    """Drop all groups and become ``nobody``, for good."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def enter_namespaces(scratch_bytes: int) -> None:
    """Enter new user, mount, network, IPC, host-name and pid namespaces with a root of their own.

    Root builds the new root with its own rights and then becomes ``nobody``, so that even a hole in the namespaces
    gives no rights outside them. Everybody else builds it with the rights that the user namespace gives.
    """
    own_proc = os.open("/proc/self", os.O_RDONLY)
    if os.geteuid() == 0:
        check(libc.unshare(NEW_MOUNTS), "unshare")
        new_root(scratch_bytes)
        become_nobody()
        prctl(PR_SET_DUMPABLE, 1)  # the change of user cleared it; without it /proc/self still belongs to root
        enter_user_namespace(0, own_proc)
    else:
        enter_user_namespace(NEW_MOUNTS, own_proc)
        new_root(scratch_bytes)
    os.close(own_proc)
    check(libc.unshare(NEW_PID_NET_IPC_UTS), "unshare")
    check(libc.sethostname(b"sandbox", 7), "sethostname")  # a program's output is not to tell the machine's


def leave_root() -> None:
    """Let root become ``nobody`` if that user can read the standard library: root's files are then out of reach."""
    if os.geteuid() != 0:
        return
    os.seteuid(NOBODY)
    readable = os.access(os.__file__, os.R_OK, effective_ids=True)
    os.seteuid(0)
    if readable:
        become_nobody()


def become_second_process() -> None:
    """Go on as pid 2 of the new pid namespace: the kernel drops signals to pid 1 that have no handler.

    The process outside and pid 1 only pass the exit status on.
    """
    for _ in ("outside", "pid 1"):
        child = os.fork()
        if child:
            _signal.signal(SIGTERM, lambda *_, child=child: os.kill(child, SIGKILL))  # so that every process is reaped
            for descriptor in (0, 1, 2):
                os.close(descriptor)
            status = os.waitpid(child, 0)[1]
            os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
        prctl(PR_SET_PDEATHSIG, SIGKILL)


def restrict_files(scratch: str | None) -> None:
    """Let Landlock allow reading the libraries and using ``scratch``; no other files, no TCP, no signals to others."""
    abi = check(libc.syscall(444, None, ctypes.c_size_t(0), 1), "landlock")
    handled = (1 << 13) - 1 | REFER * (abi >= 2) | TRUNCATE * (abi >= 3) | IOCTL_DEV * (abi >= 5)
    attributes = (ctypes.c_uint64 * 3)(handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = check(libc.syscall(444, attributes, ctypes.c_size_t(size), 0), "landlock_create_ruleset")
    rules = [(path, READ_FILE | READ_DIR) for path in readable_paths()]
    rules += [(path, READ_FILE | WRITE_FILE) for path in DEVICES if os.path.exists(path)]
    rules += [(scratch, SCRATCH_RIGHTS)] if scratch else []
    for path, rights in rules:
        handle = os.open(path, os.O_PATH)
        rule = (rights & handled).to_bytes(8, sys.byteorder) + handle.to_bytes(4, sys.byteorder)
        check(libc.syscall(445, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(handle)
    check(libc.syscall(446, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def filter_program(machine: str, pid: int) -> bytes:
    """Return the allow-list as a classic BPF program (linux/filter.h), 8 bytes an instruction."""
    arch, column = MACHINES[machine]
    load, equal, mask_with, answer = 0x20, 0x15, 0x54, 0x06
    allow, eperm, enosys, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000

    def op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return code.to_bytes(2, "little") + bytes([yes, no]) + value.to_bytes(4, "little")

    program = [op(load, 4), op(equal, arch, 1, 0), op(answer, kill), op(load, 0)]
    unconditional: dict[str, tuple] = {name: (numbers, []) for name, numbers in ALLOWED.items()}
    for numbers, conditions in (unconditional | restricted(pid)).values():
        if (number := numbers[column]) is None:
            continue
        body: list[bytes] = []
        for argument, mask, values in conditions:
            body.append(op(load, 16 + 8 * argument))  # low half of the argument: both machines are little-endian
            body += [] if mask is None else [op(mask_with, mask)]
            body += [op(equal, value, len(values) - at, 0) for at, value in enumerate(values)]
            body.append(op(answer, eperm))
        body.append(op(answer, allow))
        program += [op(equal, number, 0, len(body)), *body]
    return b"".join([*program, op(answer, enosys)])


def restrict_calls() -> None:
    """Install the seccomp filter; OSError if ``MACHINES`` does not know this machine."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"seccomp: no table for {machine}")
    code = filter_program(machine, os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    prctl(PR_SET_SECCOMP, 2, ctypes.byref(Filter(len(code) // 8, ctypes.addressof(buffer))))


def drop_capabilities() -> None:
    """Give up every capability; no_new_privs keeps an exec from bringing them back."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def set_limits(settings: dict) -> None:
    """Set resource limits; 0 sets none (CPU time of an interpreter that serves many programs)."""
    limits = {name: int(settings[name]) for name in ("AS", "CPU", "NOFILE", "NPROC") if int(settings[name])}
    # Without namespaces there is no scratch folder, and no file anywhere may grow by a byte: limits on
    # single files do not bound their sum, and unlinked, hidden or deeply nested files would escape a later check.
    limits |= {"FSIZE": int(settings["disk"]) if "namespaces" in settings["with"] else 0, "CORE": 0}
    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]  # cannot be raised
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def confine(settings: dict) -> None:
    """Lock this process in with the mechanisms named in ``settings["with"]``; OSError if one of them fails."""
    mechanisms = settings["with"].split("+")
    in_namespaces = "namespaces" in mechanisms
    if in_namespaces:
        enter_namespaces(int(settings["disk"]))
    else:
        leave_root()
    prctl(PR_SET_PDEATHSIG, SIGKILL)  # not earlier: a change of user clears it
    if in_namespaces:
        become_second_process()
    drop_capabilities()
    set_limits(settings)
    if "landlock" in mechanisms:
        restrict_files("/tmp" if in_namespaces else None)
        if not in_namespaces:
            os.chdir("/")  # a file that a program would write is forbidden there, not impossible as in /proc
    if "seccomp" in mechanisms:
        restrict_calls()


def receive(count: int) -> bytes:
    """Read exactly ``count`` bytes of standard input, unbuffered: the rest is the program's. Exit at its end."""
    data = b""
    while len(data) < count:
        piece = os.read(0, min(count - len(data), 1 << 16))
        if not piece:
            os._exit(0)
        data += piece
    return data


def fresh_main() -> dict:
    """Return the namespace of a new ``__main__``, with ``exit``, ``quit`` and ``help``, which ``-S`` leaves out."""
    import _sitebuiltins
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module.__dict__


def serve() -> None:
    """Execute trusted programs one after another, each in a namespace of its own, until the input ends."""
    import io
    import json

    channel = os.fdopen(os.dup(1), "wb")
    while True:
        program, stdin = json.loads(receive(int.from_bytes(receive(4), "big")))
        sys.stdin, sys.stdout, sys.stderr, error = io.StringIO(stdin), io.StringIO(), io.StringIO(), ""
        try:
            exec(compile(program, "<program>", "exec"), fresh_main())
        except SystemExit:
            pass
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        answer = json.dumps([sys.stdout.getvalue(), sys.stderr.getvalue(), error]).encode()
        channel.write(len(answer).to_bytes(4, "big") + answer)
        channel.flush()


def start(arguments: list[str]) -> tuple[object, dict]:
    """Lock this process in, read the program and return its code and the namespace to execute it in.

    In ``serve`` mode this never returns. If locking in fails, the process ends before it has read anything.
    """
    settings = dict(argument.split("=", 1) for argument in arguments[1:])
    try:
        confine(settings)
    except OSError as error:
        os.write(2, f"not confined: {error}".encode())
        os._exit(125)
    sys.argv = ["program"]
    os.write(1, READY)
    if settings["mode"] == "serve":
        serve()
    source = receive(int.from_bytes(receive(4), "big"))
    return compile(source, "<program>", "exec"), fresh_main()
