"""What a command may leave in place of its files and folders: things, in places, at ends.

Each thing is code that runs in the command. There, `P` is the place, `OUT` a folder outside that
must stay as it is, and `clear()` moves away or deletes what is at P.
"""

import itertools
import textwrap
from dataclasses import dataclass

PLACES = {  # where P is; the reward is read from d/r
    "reward": "os.path.join(FOLDER, 'd', 'r')",
    "folder of the reward": "os.path.join(FOLDER, 'd')",
    "output": "os.path.join(FOLDER, '.agent_output')",
    "task": "os.path.join(FOLDER, 'task.json')",
    "inside": "os.path.join(FOLDER, 'e', 'f')",
    "folder": "FOLDER",
    "parent": "os.path.dirname(FOLDER)",
}
ENDS = {
    "exit 0": "os._exit(0)",
    "exit 1": "os._exit(1)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "running": "time.sleep(600)",
    "without its parent": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)",
    "in another group": "child('time.sleep(600)', start_new_session=True); os._exit(0)",
}
NEVER_END = {"stopped", "running"}

START = """
import os, signal, socket, stat, subprocess, sys, time, fcntl, shutil
FOLDER, OUT = os.getcwd(), sys.argv[1]
os.mkdir("d"); os.mkdir("e")
P = {place}
def clear():
    if os.path.isdir(P) and not os.path.islink(P):
        os.rename(P, P + "-moved")
    elif os.path.lexists(P):
        os.remove(P)
def link(target):
    clear(); os.symlink(target, P)
def write(content=b"1"):
    clear(); open(P, "wb").write(content)
def folder():
    if not os.path.isdir(P):
        clear(); os.mkdir(P)
    os.chdir(P)
def node(kind, major, minor):
    clear(); os.mknod(P, 0o666 | kind, os.makedev(major, minor))
def child(code, **options):
    text = f"import os, time, signal, sys, shutil\\nP, OUT = {{P!r}}, {{OUT!r}}\\n" + code
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", text], **options)
def ignore(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        pass
print("bye", flush=True)
"""

_SWAP = """
child('''
def put(action, *arguments):
    try:
        if os.path.isdir(P) and not os.path.islink(P):
            os.rename(P, P + "-moved" + str(time.time_ns()))
        elif os.path.lexists(P):
            os.remove(P)
        action(*arguments)
    except OSError:
        pass
while True:
    {puts}
''')
time.sleep(0.1)
"""


def _swap(*puts: str) -> str:
    return _SWAP.format(puts="; ".join(f"put({put})" for put in puts))


THINGS = {
    "nothing": "",
    "deleted": "clear()",
    "valid": "write()",
    "empty": "write(b'')",
    "fifo": "clear(); os.mkfifo(P)",
    "link to a fifo": "os.mkfifo(OUT + '/fifo'); link(OUT + '/fifo')",
    "hard link to a fifo": "os.mkfifo(OUT + '/fifo'); clear(); os.link(OUT + '/fifo', P)",
    "dangling link": "link(OUT + '/nowhere')",
    "link to itself": "link(P)",
    "link in a circle": "os.symlink(P, OUT + '/circle'); link(OUT + '/circle')",
    "chain of links": "[os.symlink(f'{OUT}/c{n}', f'{OUT}/c{n + 1}') for n in range(60)]; "
    "link(OUT + '/c60')",
    "link to a file outside": "link(OUT + '/kept')",
    "link to a folder outside": "link(OUT)",
    "link to the parent": "link('..')",
    "link to the root": "link('/')",
    "folder with a link outside": "folder(); os.symlink(OUT, 'l')",
    "link to zero": "link('/dev/zero')",
    "link to tty": "link('/dev/tty')",
    "link to full": "link('/dev/full')",
    "link to stdin": "link('/dev/stdin')",
    "link to memory": "link('/proc/self/mem')",
    "link to kernel messages": "link('/proc/kmsg')",
    "zero": "ignore(node, stat.S_IFCHR, 1, 5)",
    "terminal": "ignore(node, stat.S_IFCHR, 5, 0)",
    "disk": "ignore(node, stat.S_IFBLK, 7, 0)",
    "socket": "clear(); os.chdir(os.path.dirname(P)); "
    "socket.socket(socket.AF_UNIX).bind(os.path.basename(P))",
    "listening socket": "clear(); os.chdir(os.path.dirname(P)); "
    "s = socket.socket(socket.AF_UNIX); s.bind(os.path.basename(P)); s.listen()",
    "folder": "clear(); os.mkdir(P)",
    "nested folders": "folder()\nfor _ in range(3000): os.mkdir('n'); os.chdir('n')",
    "long names": "folder()\nfor _ in range(100): os.mkdir('n' * 255); os.chdir('n' * 255)",
    "many files": "folder()\nfor n in range(5000): open(str(n), 'w').close()",
    "many hard links": "folder(); open('a', 'w').close()\n"
    "for n in range(2000): os.link('a', str(n))",
    "names of bytes": "folder()\n"
    "for n in (b'\\xff', b'\\xed\\xa0\\x80', b'\\n', b'-rf', b'\\x1b[31m', b'*'):\n"
    "    open(n, 'w').close(); os.mkdir(n + b'd'); open(n + b'd/' + n, 'w').close()",
    "sparse": "write(); os.truncate(P, 10 << 30)",
    "just too large": "write(b' ' * (1 << 20) + b'1')",
    "padded": "write(b'1' + b' ' * ((1 << 20) - 1))",
    "nested JSON": "write(b'[' * 500_000)",
    "nested objects": "write(b'{\"a\":' * 100_000)",
    "many digits": "write(b'1' * 100_000)",
    "many keys": "write(b'{' + b','.join(b'\"k%d\": 1' % n for n in range(70_000)) + b'}')",
    "surrogates": "write(b'{\"\\\\ud800\": 1, \"reward\": 1}')",
    "bytes": "write(bytes(range(256)))",
    "NUL bytes": "write(b'\\0' * 1000)",
    "not finite": "write(b'NaN')",
    "escapes": "write(b'\"\\\\u001b[2J\\\\u0000\\\\ud800\"'); "
    "os.write(1, b'\\x1b[2J\\0\\xff\\xed\\xa0\\x80')",
    "no rights": "write(); os.chmod(P, 0)",
    "folder without rights": "folder(); open('a', 'w').close(); os.chmod(P, 0)",
    "no mask": "os.umask(0o777); write()",
    "locked": "write(); F = open(P, 'r+')\n"
    "fcntl.flock(F, fcntl.LOCK_EX); fcntl.lockf(F, fcntl.LOCK_EX)",
    "growing": "write(); child('while True: open(P, \"ab\").write(b\" \" * 4096)'); "
    "time.sleep(0.1)",
    "truncated": "write(b' ' * 900_000); child('while True: os.truncate(P, 0); "
    "os.truncate(P, 900_000)'); time.sleep(0.1)",
    "swapped file": _swap("lambda: open(P, 'w').write('1')", "os.mkfifo, P"),
    "swapped link": _swap("os.mkdir, P", "os.symlink, OUT, P"),
    "swapped device": _swap("os.mkdir, P", "os.symlink, '/dev/zero', P", "os.symlink, P, P"),
    "filled again": "child('n = 0\\nwhile True:\\n n += 1\\n os.makedirs(P + \"/x\" + str(n), "
    "exist_ok=True)') if P != os.path.dirname(FOLDER) else None; time.sleep(0.1)",
    "open pipe": "child('time.sleep(600)'); write()",
    "stopped child": "child('os.kill(os.getpid(), signal.SIGSTOP)'); write()",
    "deaf child": "child('for n in range(1, 32): n in (9, 19) or signal.signal(n, signal.SIG_IGN)"
    "\\ntime.sleep(600)'.replace(': n in', ':\\n n in')); write()",
    "closed output": "write(); os.close(0); os.close(1); os.close(2)",
    "much output": "write(); [os.write(1, b'x' * 65536) for _ in range(100)]",
    "endless output": "child('while True: os.write(1, b\"y\" * 65536)'); time.sleep(0.1)",
    "many children": "[child('time.sleep(600)') for _ in range(8)]; write()",
}  # fmt: skip


@dataclass(frozen=True)
class Leftover:
    """One behaviour of a command."""

    thing: str
    place: str
    end: str

    @property
    def code(self) -> str:
        """What the command runs; it says that it is ready by a file outside."""
        start = START.format(place=PLACES[self.place])
        ready = "open(OUT + '/ready', 'w').close()"
        return "\n".join((start, textwrap.dedent(THINGS[self.thing]), ready, ENDS[self.end]))


ALL = [Leftover(*parts) for parts in itertools.product(THINGS, PLACES, ENDS)]
