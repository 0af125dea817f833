"""Programs that try to get out of the sandbox. Each prints ESCAPED where it succeeds.

``{secret}`` is a file of this user outside the sandbox, ``{outside}`` a path there that does not exist,
``{project}`` the project, ``{port}`` a listening TCP port, ``{parent}`` this process, ``{abstract}`` a listening
abstract Unix socket. ``status`` is how the run must end (None: in any way but by a limit), ``bare`` whether the
attack succeeds without the sandbox's locks, which shows that it is one.
"""

# ruff: noqa: E501  (programs in lines of their own)

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from envs.trace.sandbox import Sandbox, SandboxError


def works(mechanisms):
    """Whether this machine offers them; a level it lacks is not tested on it."""
    try:
        with Sandbox(min_level=0, spares=1, mechanisms=mechanisms) as box:
            return box.run("print(1)").stdout == "1\n"
    except SandboxError:
        return False


def run_all(box, programs):
    """Runs of (program, standard input), three at a time, in order."""
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda program: box.run(*program), programs))


class Attack(NamedTuple):
    program: str
    status: str | None = None
    bare: bool = False


SYSCALL = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
ATTACKS = {
    "read a secret": Attack("print(open('{secret}').read() and 'ESCAPED')", bare=True),
    "read the project": Attack("print(open('{project}/env_wrapper.py').read() and 'ESCAPED')", bare=True),
    "list home": Attack("import os\nprint('ESCAPED' if len(os.listdir('{home}')) > 1 else '')"),
    "read /etc/passwd": Attack("print(open('/etc/passwd').read() and 'ESCAPED')", bare=True),
    "read the parent's environment": Attack("print(open('/proc/{parent}/environ').read() and 'ESCAPED')"),
    "read the parent's memory": Attack("print(open('/proc/{parent}/mem', 'rb') and 'ESCAPED')"),
    "walk /proc for environments": Attack(
        "import os\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try:\n"
        "        if pid != str(os.getpid()) and open(f'/proc/{{pid}}/environ').read(): print('ESCAPED')\n"
        "    except OSError: pass"
    ),
    "inherited environment": Attack(
        "import os\nprint('ESCAPED' if 'SANDBOX_TEST_TOKEN' in os.environ or 'PATH' in os.environ else '')", status="ok"
    ),
    "inherited descriptors": Attack(
        "import os\n"
        "for fd in range(3, 64):\n"
        "    try:\n"
        "        os.fstat(fd); print('ESCAPED', fd)\n"
        "    except OSError: pass",
        status="ok",
    ),
    "write outside": Attack("open('{outside}', 'w').write('x'); print('ESCAPED')", bare=True),
    "overwrite a file": Attack("open('{secret}', 'a').write('x'); print('ESCAPED')", bare=True),
    "truncate a file": Attack("import os\nos.truncate('{secret}', 5); print('ESCAPED')", bare=True),
    "truncate by opening": Attack("import os\nos.open('{secret}', os.O_TRUNC); print('ESCAPED')", bare=True),
    "delete a file": Attack("import os\nos.unlink('{spare}'); print('ESCAPED')", bare=True),
    "change a mode": Attack("import os\nos.chmod('{secret}', 0o777); print('ESCAPED')", bare=True),
    "change times": Attack("import os\nos.utime('{secret}', (0, 0)); print('ESCAPED')", bare=True),
    "write into the standard library": Attack(
        "import os\nopen(os.path.dirname(os.__file__) + '/sandbox_was_here.py', 'w'); print('ESCAPED')"
    ),
    "symbolic link": Attack("import os\nos.symlink('{secret}', 'l'); print(open('l').read() and 'ESCAPED')"),
    "hard link": Attack("import os\nos.link('{secret}', 'l'); print(open('l').read() and 'ESCAPED')"),
    "symbolic link to a folder": Attack(
        "import os\nos.symlink(os.path.dirname('{secret}'), 'd'); print(os.listdir('d') and 'ESCAPED')"
    ),
    "dots": Attack("print(open('../' * 20 + '{secret}'[1:]).read() and 'ESCAPED')", bare=True),
    "rename into the folder": Attack("import os\nos.rename('{secret}', 'x'); print(open('x').read() and 'ESCAPED')"),
    "through /proc/self/root": Attack("print(open('/proc/self/root{secret}').read() and 'ESCAPED')", bare=True),
    "TCP": Attack("import socket\nsocket.create_connection(('127.0.0.1', {port}), 1); print('ESCAPED')", bare=True),
    "UDP": Attack(
        "import socket\nsocket.socket(2, 2).sendto(b'x', ('127.0.0.1', {port})); print('ESCAPED')", bare=True
    ),
    "abstract Unix socket": Attack(
        "import socket\ns = socket.socket(1, 1); s.connect('\\0{abstract}'); print('ESCAPED')", bare=True
    ),
    "socket by ctypes": Attack(SYSCALL + "print('ESCAPED' if libc.socket(2, 1, 0) >= 0 else '')", bare=True),
    "socket by raw system call": Attack(SYSCALL + "print('ESCAPED' if libc.syscall(41, 2, 1, 0) >= 0 else '')"),
    "32-bit system call": Attack(
        "import ctypes, mmap\n"
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('b814000000cd80c3'))\n"  # mov eax, 20 (getpid of i386); int 0x80; ret
        "run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))\n"
        "print('ESCAPED', run())",
    ),
    "x32 system call": Attack(SYSCALL + "print('ESCAPED' if libc.syscall(0x40000000 + 41, 2, 1, 0) >= 0 else '')"),
    "io_uring": Attack(
        SYSCALL + "print('ESCAPED' if libc.syscall(425, 4, ctypes.create_string_buffer(256)) >= 0 else '')"
    ),
    "curl in a subprocess": Attack(
        "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'], check=True); print('ESCAPED')", bare=True
    ),
    "os.system": Attack("import os\nprint('ESCAPED' if os.system('true') == 0 else '')", bare=True),
    "exec": Attack("import os\nos.execv('/bin/echo', ['echo', 'ESCAPED'])", bare=True),
    "fork": Attack("import os\nos.fork(); print('ESCAPED')", bare=True),
    "fork bomb": Attack("import os\nwhile True: os.fork(); print('ESCAPED')"),
    "fork bomb by ctypes": Attack(
        SYSCALL + "for _ in range(99):\n  if libc.fork() >= 0: print('ESCAPED')\n"
        "  if libc.syscall(56, 17, 0, 0, 0, 0) >= 0: print('ESCAPED')"
    ),
    "multiprocessing": Attack(
        "import multiprocessing as m\np = m.get_context('fork').Process(target=print, args=('ESCAPED',))\n"
        "p.start(); p.join()",
        bare=True,
    ),
    "orphaned grandchild": Attack(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        print('ESCAPED', flush=True); time.sleep(30)\n"
        "    os._exit(0)\n"
        "os.wait(); time.sleep(0.3)",
        bare=True,
    ),
    "own session": Attack(SYSCALL + "print('ESCAPED' if libc.setsid() >= 0 else '')"),
    "signal to the parent": Attack("import os\nos.kill({parent}, 10); print('ESCAPED')", bare=True),
    "signal to everybody": Attack("import os\nos.kill(-1, 0); print('ESCAPED')", bare=True),
    "signal to the group": Attack("import os\nos.killpg(0, 0); print('ESCAPED')", bare=True),
    "signal by file owner": Attack(
        "import fcntl, os, signal\n"
        "r, w = os.pipe()\n"
        "fcntl.fcntl(r, fcntl.F_SETOWN, {parent}); fcntl.fcntl(r, fcntl.F_SETSIG, 10)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x'); print('ESCAPED')",
        bare=True,
    ),
    "limits of the parent": Attack("import resource\nresource.prlimit({parent}, 7); print('ESCAPED')", bare=True),
    "priority of the parent": Attack("import os\nos.setpriority(0, {parent}, 1); print('ESCAPED')"),
    "ptrace": Attack(SYSCALL + "print('ESCAPED' if libc.ptrace(16, {parent}, 0, 0) >= 0 else '')"),
    "higher limits": Attack(
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2); print('ESCAPED')"
    ),
    "become root": Attack("import os\nos.setuid(0); os.setgid(0); print('ESCAPED')"),
    "new namespaces": Attack(SYSCALL + "print('ESCAPED' if libc.unshare(0x10000000) == 0 else '')", bare=True),
    "mount": Attack(SYSCALL + "print('ESCAPED' if libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0 else '')"),
    "chroot": Attack("import os\nos.chroot('.'); print('ESCAPED')"),
    "no death signal": Attack(SYSCALL + "print('ESCAPED' if libc.prctl(1, 0, 0, 0, 0) == 0 else '')", bare=True),
    "memory file": Attack("import os\nos.memfd_create('x'); print('ESCAPED')", bare=True),
    "10 GB of memory": Attack("x = bytearray(10 << 30); print('ESCAPED')"),
    "memory bit by bit": Attack("x = []\nwhile True: x.append(bytearray(1 << 20))"),
    "memory in one number": Attack("x = 10 ** (10 ** 10); print('ESCAPED')"),
    "endless output": Attack("while True: print('x' * 1000)", status="output"),
    "endless errors": Attack("import sys\nwhile True: sys.stderr.write('x' * 1000)", status="timeout"),
    "output without a newline": Attack("import os\nwhile True: os.write(1, b'x' * 65536)", status="output"),
    "one huge file": Attack(
        "f = open('big', 'wb')\nfor _ in range(200): f.write(b'x' * (1 << 20)); f.flush()\nprint('ESCAPED')"
    ),
    "many files": Attack(
        "for n in range(2000):\n    open(f'f{{n}}', 'wb').write(b'x' * (1 << 18))\nprint('ESCAPED')"
    ),
    "many empty files": Attack("for n in range(10 ** 6): open(f'f{{n}}', 'wb').close()\nprint('ESCAPED')"),
    "all descriptors": Attack("x = [open('f', 'w') for _ in range(1000)]; print('ESCAPED')"),
    "many threads": Attack(
        "import threading, time\n"
        "threading.stack_size(32768)\n"
        "for _ in range(20000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('ESCAPED')"
    ),
    "endless loop": Attack("while True: pass", status="timeout"),
    "endless sleep": Attack("import time\ntime.sleep(3600)", status="timeout"),
    "endless, deaf to signals": Attack(
        "import signal\n"
        "for s in range(1, 32):\n"
        "    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except OSError: pass\n"
        "while True: pass",
        status="timeout",
    ),
    "endless in C": Attack("sum(range(10 ** 15))", status="timeout"),
    "endless with closed pipes": Attack(
        "import os, time\nos.close(0); os.close(1); os.close(2)\ntime.sleep(3600)", status="timeout"
    ),
    "endless thread after the end": Attack(
        "import sys, threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\nsys.exit()",
        status="timeout",
    ),
    "sys.exit in threads": Attack(
        "import sys, threading\nx = [threading.Thread(target=sys.exit) for _ in range(9)]\nfor t in x: t.start()",
        status="ok",
    ),
    "os._exit in a thread": Attack("import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()"),
    "huge recursion": Attack(
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n): return f(n + 1) + 1\nf(0)"
    ),
    "null pointer": Attack("import ctypes\nctypes.string_at(0)", status="error"),
    "abort": Attack("import os\nos.abort()", status="error"),
    "endless input": Attack("import sys\nwhile True: sys.stdin.read()", status="timeout"),
}  # fmt: skip

# Programs after more disk than 4 MB, or to leave behind what cannot be swept away. ``fill`` writes into 64 files of a
# megabyte; what is held when it ends, by whatever name or none, is ``held``. Every place is tried.
FILL = """
import ctypes, mmap, os, resource, signal, socket, sys, threading
held, open_files, libc, BLOCK = 0, [], ctypes.CDLL(None, use_errno=True), b"x" * (1 << 20)
def attempt(call, *args):
    try: return call(*args)
    except (OSError, ValueError, MemoryError, RuntimeError, AttributeError, OverflowError): return None
def write(descriptor, data=BLOCK):
    global held
    while data:
        done = attempt(os.write, descriptor, data)
        if not done: return False
        held += done; data = data[done:]
    return True
def create(name, flags=0):
    return attempt(os.open, name, os.O_RDWR | os.O_CREAT | flags, 0o600)
def fill(name=lambda n: f"f{n}", after=lambda n: None, close=True, flags=0, write=write):
    for n in range(64):
        descriptor = create(name(n), flags)
        if descriptor is None: continue
        write(descriptor)
        after(n)
        attempt(os.close, descriptor) if close else open_files.append(descriptor)
def deep(levels=1200, name="d" * 200, mode=0o700):
    for _ in range(levels):
        if attempt(os.mkdir, name, mode) or attempt(os.chdir, name): break
def copied(call):
    def write(descriptor):
        global held
        source = attempt(os.open, sys.executable, os.O_RDONLY) or attempt(os.open, os.__file__, os.O_RDONLY)
        for _ in range(400):
            held += attempt(call, descriptor, source) or 0
            attempt(os.lseek, source, 0, 0)
    return write
PLACES = ["/tmp", "/var/tmp", "/dev/shm", "/run", "/", "/dev", "/home", "/root", "/proc/self", "/sys", "/usr/lib", "/mnt"]
"""
END = "\nprint('ESCAPED', held) if held > 4 << 20 else None"
DISK = {
    name: FILL + program + END
    for name, program in {
        "many files": "fill()",
        "one file": "fill(lambda n: 'f', flags=os.O_APPEND)",
        "unlinked, still open": "fill(after=lambda n: attempt(os.unlink, f'f{n}'), close=False)",
        "unlinked over and over": "for _ in range(20): fill(after=lambda n: attempt(os.unlink, f'f{n}'), close=False)",
        "renamed away": "fill(lambda n: 'f', after=lambda n: attempt(os.rename, 'f', f'g{n}'))",
        "renamed over open files": "fill(after=lambda n: attempt(os.rename, f'f{n}', 'f'), close=False)",
        "nested folders": "deep(60, 'd'); fill()",
        "deeper than the longest path": "deep(); fill()",
        "1,200 empty folders": "deep(1200, 'd')",
        "10,000 empty folders": "for n in range(10000): attempt(os.mkdir, f'd{n}')",
        "folders that cannot be listed": "os.umask(0); deep(9, 'd', 0o300); fill()",
        "folders that cannot be entered": "os.umask(0); attempt(os.mkdir, 'd', 0o300); attempt(os.chdir, 'd'); fill()\n"
        "attempt(os.chdir, '..'); attempt(os.mkdir, 'e', 0)",
        "a tree of mode 000": "os.umask(0o777)\nfor n in range(99): attempt(os.mkdir, f'd{n}')\nfill()",
        "an unlinked working directory": "attempt(os.mkdir, 'd'); attempt(os.chdir, 'd'); attempt(os.rmdir, '../d'); fill()",
        "hidden names": "fill(lambda n: '.' + '\\n' * n + 'x')",
        "longest names": "fill(lambda n: f'{n:03}' * 85)",
        "names that are no text": "fill(lambda n: b'\\xff\\xfe%d' % n)",
        "empty files": "for n in range(20000): attempt(os.close, create(f'f{n}') or -1)",
        "long symbolic links": "for n in range(20000): attempt(os.symlink, 'x' * 4000, f'l{n}')",
        "hard links": "create('f')\nfor n in range(20000): attempt(os.link, 'f', f'l{n}')",
        "pipes with names": "for n in range(99): attempt(os.mkfifo, f'p{n}'); attempt(os.mknod, f'n{n}')",
        "holes": "def far(d):\n    for at in range(64): held_at = attempt(os.lseek, d, at << 30, 0); write(d, b'x' * 65536)\n"
        "fill(write=far)",
        "grown by truncating": "def grow(d):\n    global held\n    if attempt(os.ftruncate, d, 1 << 30) is None: held += os.fstat(d).st_blocks * 512\n"
        "fill(write=grow)",
        "reserved": "def grow(d):\n    global held\n    if libc.posix_fallocate(d, 0, 1 << 22) == 0: held += 1 << 22\nfill(write=grow)",
        "mapped": "def grow(d):\n    global held\n    attempt(os.ftruncate, d, 1 << 20)\n    m = attempt(mmap.mmap, d, 1 << 20)\n"
        "    if m: held += attempt(m.write, BLOCK) or 0\nfill(write=grow)",
        "written by position": "def grow(d):\n    global held\n    held += attempt(os.pwritev, d, [BLOCK] * 8, 0) or 0\nfill(write=grow)",
        "sendfile": "fill(write=copied(lambda d, s: os.sendfile(d, s, None, 1 << 20)))",
        "copy_file_range": "fill(write=copied(lambda d, s: os.copy_file_range(s, d, 1 << 20)))",
        "splice": "fill(write=copied(lambda d, s: os.splice(s, d, 1 << 20)))",
        "files without a name": "fill(lambda n: '.', flags=getattr(os, 'O_TMPFILE', 0o20200000), close=False)",
        "memory files": "for n in range(64):\n    d = attempt(os.memfd_create, 'x')\n    if d is not None: write(d)",
        "shared memory": "for n in range(64): held += (libc.shmget(n + 7, 1 << 20, 0o1600) >= 0) << 20",
        "shared memory files": "for n in range(64):\n    d = libc.shm_open(b'/s%d' % n, 66, 384)\n    if d >= 0: write(d)",
        "every other place": "for place in PLACES: fill(lambda n: f'{place}/sandbox-left-{n}')",
        "through /proc": "fill(lambda n: f'/proc/self/fd/{n % 3}', flags=os.O_TRUNC); fill(lambda n: f'/proc/self/cwd/f{n}')",
        "a higher limit": "attempt(resource.setrlimit, resource.RLIMIT_FSIZE, (1 << 40, 1 << 40)); fill()",
        "deaf to the limit": "attempt(signal.signal, signal.SIGXFSZ, signal.SIG_IGN); fill(close=False)",
        "killed by the limit": "attempt(signal.signal, signal.SIGXFSZ, signal.SIG_DFL); fill()",
        "threads": "t = [threading.Thread(target=fill, args=(lambda n, k=k: f'f{k}-{n}',)) for k in range(8)]\n"
        "for x in t: attempt(x.start)\nfor x in t: attempt(x.join)",
        "pipes, filled": "import fcntl\nfor n in range(99):\n    p = attempt(os.pipe)\n    if p:\n"
        "        os.set_blocking(p[1], False); attempt(fcntl.fcntl, p[1], 1031, 1 << 20); write(p[1])",
        "sockets, filled": "for n in range(99):\n    p = attempt(socket.socketpair)\n    if p:\n"
        "        p[0].setblocking(False); open_files.append(p); write(p[0].fileno(), b'x' * 65536)",
        "temporary files": "import tempfile\nfor n in range(64):\n    f = attempt(tempfile.TemporaryFile)\n"
        "    if f: write(f.fileno()); open_files.append(f)",
        "a data base": "import sqlite3\ntry:\n    c = sqlite3.connect('db'); c.execute('create table t(x)')\n    while held < 1 << 24:\n"
        "        c.execute('insert into t values (zeroblob(1000000))'); c.commit(); held += 10 ** 6\n"
        "except sqlite3.Error: pass",
        "attributes": "create('f')\nfor n in range(999): held += attempt(os.setxattr, 'f', f'user.{n}', b'x' * 4000) or 0",
        "a core": "x = bytearray(1 << 26); attempt(resource.setrlimit, resource.RLIMIT_CORE, (-1, -1)); os.abort()",
        "a trace": "import faulthandler\nd = create('f')\nif d is not None:\n    for n in range(9999): attempt(faulthandler.dump_traceback, d)\n"
        "    held += os.fstat(d).st_size",
    }.items()
}
