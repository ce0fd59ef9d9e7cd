"""Programs that try to get out, to do harm, or to pass for what they are not.

`{name}` stands for something of the machine's: see `test_hostile.py`. Each of `REFUSED` must raise before it reaches its last line.
"""

SYSCALL = """import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0: raise OSError(ctypes.get_errno(), 'refused')
    return result
"""

REFUSED = {
    # Files: reading
    "reads the accounts": "open('/etc/passwd').read()",
    "reads a neighbour's file": "open('{victim}').read()",
    "reads the project": "open('{project}/pyproject.toml').read()",
    "lists the root": "import os\nos.listdir('/')",
    "lists the temporary folder": "import os\nos.listdir('{folder}')",
    "reads by a path that climbs": "import sys\nopen('/usr/lib/../../etc/passwd').read()",
    "reads by a link that the machine has": "open('{link}').read()",
    "reads by a descriptor of the root": "import os\nd = os.open('/', os.O_PATH)\nos.open('etc/passwd', os.O_RDONLY, dir_fd=d)",
    "opens by openat2": SYSCALL + "call(437, -100, b'/etc/passwd', bytes(24), 24)",
    "opens by file handle": SYSCALL + "call(304, -100, b'/etc/passwd', bytes(128), 0)",
    "reads the disk": "open('/dev/vda', 'rb').read(1)",
    "reads the kernel's memory": "open('/dev/mem', 'rb').read(1)",
    "opens a terminal": "open('/dev/tty')",
    # Files: writing
    "writes in the temporary folder": "open('{folder}/new', 'w').write('a')",
    "overwrites a neighbour's file": "open('{victim}', 'w')",
    "appends to a neighbour's file": "open('{victim}', 'a')",
    "empties a file that it may read": "import os\nos.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "writes a library": "import os\nopen(os.__file__, 'a').write('')",
    "truncates by path": "import os\nos.truncate('{victim}', 0)",
    "makes a link to read through": "import os\nos.symlink('/etc/passwd', '{folder}/link')",
    "makes a hard link": "import os\nos.link('{victim}', '{folder}/link')",
    "renames": "import os\nos.rename('{victim}', '{folder}/other')",
    "removes": "import os\nos.remove('{victim}')",
    "makes a folder": "import os\nos.mkdir('{folder}/made')",
    "makes a pipe with a name": "import os\nos.mkfifo('{folder}/fifo')",
    "changes rights": "import os\nos.chmod('{victim}', 0o777)",
    "changes times": "import os\nos.utime('{victim}', (1, 1))",
    "sets an attribute": "import os\nos.setxattr('{victim}', 'user.a', b'a')",
    "leaves shared memory behind": "from multiprocessing import shared_memory\nshared_memory.SharedMemory('left', True, 10)",
    "leaves System V memory behind": SYSCALL + "call(29, 77, 4096, 0o1666)",
    "leaves a message queue behind": SYSCALL + "call(240, b'left', 0o102, 0o600, 0)",
    "makes a file in memory": "import os\nos.memfd_create('a')",
    # Network, of every family
    **{
        f"opens a socket of {family}": f"import socket\nsocket.socket(socket.{family}, socket.{kind})"
        for family, kind in (
            ("AF_INET", "SOCK_STREAM"),
            ("AF_INET", "SOCK_DGRAM"),
            ("AF_INET6", "SOCK_STREAM"),
            ("AF_UNIX", "SOCK_STREAM"),
            ("AF_NETLINK", "SOCK_RAW"),
            ("AF_PACKET", "SOCK_RAW"),
            ("AF_VSOCK", "SOCK_STREAM"),
            ("AF_ALG", "SOCK_SEQPACKET"),
        )
    },
    "makes a pair of sockets": "import socket\nsocket.socketpair()",
    "asks a name server": "import socket\nsocket.getaddrinfo('example.org', 80)",
    # Processes
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "asks whether its parent lives": "import os\nos.kill(os.getppid(), 0)",
    "kills a neighbour": "import os\nos.kill({neighbour}, 9)",
    "kills all": "import os\nos.kill(-1, 9)",
    "kills its group": "import os\nos.kill(0, 9)",
    "kills itself, as if from outside": "import os\nos.kill(os.getpid(), 9)",
    "kills a thread of a neighbour": SYSCALL + "call(200, {neighbour}, 9)",
    "queues a signal": SYSCALL + "call(129, {neighbour}, 9, bytes(128))",
    "signals by descriptor": SYSCALL + "call(424, call(434, {neighbour}, 0), 9, None, 0)",
    "signals by owning a pipe": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, 8, {neighbour})",
    "chooses the signal of a pipe": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, 10, 9)",
    "owns a pipe by ioctl": "import fcntl, os, struct\nr, w = os.pipe()\nfcntl.ioctl(r, 0x8901, struct.pack('i', {neighbour}))",
    "types into a terminal": "import fcntl\nfcntl.ioctl(0, 0x5412, b'a')",
    "traces its parent": SYSCALL + "call(101, 16, os.getppid(), 0, 0)",
    "reads its parent's memory": "import os\nopen(f'/proc/{{os.getppid()}}/mem', 'rb').read(1)",
    "reads its parent's environment": "import os\nopen(f'/proc/{{os.getppid()}}/environ', 'rb').read(1)",
    "reads a neighbour's memory by call": SYSCALL + "call(310, {neighbour}, bytes(16), 1, bytes(16), 1, 0)",
    "takes a neighbour's descriptor": SYSCALL + "call(438, call(434, {neighbour}, 0), 0, 0)",
    "limits its parent": "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
    "lists processes": "import os\nos.listdir('/proc')",
    "reads its own maps": "open('/proc/self/maps').read()",
    "follows its parent's links": "import os\nos.readlink(f'/proc/{{os.getppid()}}/cwd')",
    "opens its parent's files": "import os\nopen(f'/proc/{{os.getppid()}}/fd/2', 'w')",
    "forks": "import os\nos.fork()",
    "forks by vfork": SYSCALL + "call(58)",
    "forks by clone": SYSCALL + "call(56, 17, 0, 0, 0, 0)",
    "forks by clone3": SYSCALL + "call(435, (17).to_bytes(40, 'little'), 64)",
    "starts a program": "import subprocess\nsubprocess.run(['/bin/true'])",
    "becomes another program": "import os\nos.execv('/bin/true', ['true'])",
    "becomes a file in memory": SYSCALL + "call(322, 1, b'', 0, 0, 0x1000)",
    "uses a pool": "import multiprocessing\nmultiprocessing.Pool(2)",
    # Rights
    "raises its memory limit": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "raises its file limit": "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))",
    "has the kernel kill it, as if from outside": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
    "makes a user namespace": SYSCALL + "call(272, 0x10000000)",
    "enters a namespace": SYSCALL + "call(308, 0, 0)",
    "mounts": SYSCALL + "call(165, b'none', b'/tmp', b'tmpfs', 0, 0)",
    "changes the root": SYSCALL + "call(161, b'/tmp')",
    "becomes root": SYSCALL + "call(105, 0)",
    "takes capabilities": SYSCALL + "call(126, (0x20080522).to_bytes(8, 'little'), b'\\xff' * 24)",
    "outlives its parent": SYSCALL + "call(157, 1, 0, 0, 0, 0)",
    "lets others look into it": SYSCALL + "call(157, 4, 1, 0, 0, 0)",
    "loads a program into the kernel": SYSCALL + "call(321, 0, bytes(120), 120)",
    "opens a ring": SYSCALL + "call(425, 8, bytes(120))",
    "watches the kernel": SYSCALL + "call(298, bytes(120), 0, -1, -1, 0)",
    "handles page faults": SYSCALL + "call(323, 0)",
    "keeps a key": SYSCALL + "call(248, b'user', b'left', b'a', 1, -3)",
    "sets the clock": "import time\ntime.clock_settime(0, 0)",
    "gains priority": "import os\nos.nice(-5)",
    "chooses its processors": "import os\nos.sched_setaffinity(0, [0])",
    "locks memory": SYSCALL + "call(151, 3)",
    "changes its personality": SYSCALL + "call(135, 0x0040000)",
    # Descriptors
    "finds an inherited descriptor": "import os\nos.fstat(3)\n",
    "finds the host's socket": "import os, stat\n[n for n in range(64) if stat.S_ISSOCK(os.fstat(n).st_mode)][0]",
}

ENDED = {
    # name: (program, verdicts that it may get)
    "computes for ever": ("while True: pass", {"out_of_time"}),
    "computes for ever in C": ("sum(range(10**12))", {"out_of_time"}),
    "computes one huge power": ("print(len(str(3 ** 10**9)))", {"out_of_time", "crashed", "out_of_memory"}),
    "backtracks for ever in C": ("import re\nre.match('(a+)+b', 'a' * 64)", {"out_of_time"}),
    "sleeps": ("import time\ntime.sleep(3600)", {"out_of_time"}),
    "stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", {"out_of_time"}),
    "waits for a thread for ever": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()",
        {"out_of_time"},
    ),
    "ignores signals": (
        "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        {"out_of_time"},
    ),
    "computes in threads": (
        "import threading\ndef f():\n    while True: pass\nfor _ in range(8): threading.Thread(target=f).start()",
        {"out_of_time"},
    ),
    "takes memory at once": ("a = bytearray(8 << 30)", {"out_of_memory"}),
    # Of pages that are never written: on a slow machine the kernel's zeroing of 256 MB alone may outlast the time limit.
    "takes memory bit by bit": ("a = []\nwhile True: a.append(bytes(10**6))", {"out_of_memory"}),
    "takes memory by mapping": (
        "import mmap\na = [mmap.mmap(-1, 2**28) for _ in range(99)]",
        {"out_of_memory", "crashed"},
    ),
    "recurses in C": (
        "import sys\nsys.setrecursionlimit(10**9)\na = []\nfor _ in range(10**6): a = [a]\nrepr(a)",
        {"crashed", "out_of_time"},
    ),
    "starts threads without end": (
        "import threading, time\nthreading.stack_size(2**15)\n"
        "while True: threading.Thread(target=time.sleep, args=(60,)).start()",
        {"crashed"},
    ),
    "floods its output": ("while True: print('a' * 10**5)", {"crashed"}),
    "floods its errors": ("import sys\nwhile True: sys.stderr.write('a' * 10**5)", {"crashed"}),
    "leaps ahead in its output": ("import os\nos.lseek(1, 10**12, 0)\nos.write(1, b'a')", {"crashed"}),
    "overflows its input": ("import os\nwhile True: os.write(0, b'a' * 10**6)", {"crashed"}),
    "opens files without end": ("a = []\nwhile True: a.append(open('/dev/zero'))", {"crashed"}),
    "aborts": ("import os\nos.abort()", {"crashed"}),
    "reads where nothing is": ("import ctypes\nctypes.string_at(0)", {"crashed"}),
    "calls with the other architecture's numbers": (
        SYSCALL + "libc.syscall(0x40000000 + 39)",
        {"crashed"},
    ),
    "exits with the sign for no memory": ("import os\nos._exit(77)", {"out_of_memory"}),
    "takes its host's frames apart": (
        "import sys\nf = sys._getframe()\nwhile f: f.f_locals.get('connection', sys.stdout).close(); f = f.f_back",
        {"ok", "crashed"},
    ),
}
IDLE = ("sleeps", "stops itself", "waits for a thread for ever")
"""They take no processor time: only the clock ends them."""
