"""The command line that ps and /proc show for a forked worker: that of its script, word for word.

A process's arguments lie in one block of its stack; the forkserver's own command line is longer than any worker's, so there is
room. Words stay separated by NUL bytes, as execve leaves them (setproctitle would join them), and the rest of the block is
cleared; /proc/<pid>/environ is not touched.
Source: proc(5), stat fields 48 and 49 (arg_start, arg_end).
"""


def show(words: list[bytes]) -> bool:
    """Replace this process's visible command line; longer ones are cut. False where the kernel does not tell where it lies."""
    import ctypes

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    with open("/proc/self/cmdline", "rb") as file:
        current = file.read()
    room = end - start
    if start == 0 or room != len(current) or ctypes.string_at(start, room) != current:
        return False
    text = b"".join(word + b"\0" for word in words)[: room - 1]
    ctypes.memmove(start, text.ljust(room, b"\0"), room)
    return True
