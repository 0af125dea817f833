"""Programs that try to get out of the sandbox. Each prints ESCAPED where it succeeds.

``{secret}`` is a file of this user outside the sandbox, ``{outside}`` a path there that does not exist,
``{project}`` the project, ``{port}`` a listening TCP port, ``{parent}`` this process, ``{abstract}`` a listening
abstract Unix socket. ``status`` is how the run must end (None: in any way but by a limit), ``bare`` whether the
attack succeeds without the sandbox's locks, which shows that it is one.
"""

from typing import NamedTuple


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
    "symbolic link": Attack("import os\nos.symlink('{secret}', 'l'); print(open('l').read() and 'ESCAPED')", bare=True),
    "hard link": Attack("import os\nos.link('{secret}', 'l'); print(open('l').read() and 'ESCAPED')"),
    "symbolic link to a folder": Attack(
        "import os\nos.symlink(os.path.dirname('{secret}'), 'd'); print(os.listdir('d') and 'ESCAPED')", bare=True
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
        "os.wait()",
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
    "endless input": Attack("import sys\nwhile True: sys.stdin.read(); open('x', 'w').close()", status="timeout"),
}  # fmt: skip
