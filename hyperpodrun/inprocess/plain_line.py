import socket, threading
import msgspec
from hyperpodrun.agent.wire import address, link

class PlainLine:
    def __init__(self, path, on_message, on_end):
        self._s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with address.fitting(path) as short: self._s.connect(short)
        self._dec = msgspec.msgpack.Decoder(link.ToWorker)
        self._m, self._e = on_message, on_end
        threading.Thread(target=self._read, name="hyperpodrun-line", daemon=True).start()
    def send(self, message):
        self._s.send(msgspec.msgpack.encode(message))
    def _read(self):
        while True:
            try: data = self._s.recv(link.PACKET_BYTES)
            except OSError: data = b""
            if not data: break
            self._m(self._dec.decode(data))
        self._e()

def connect(path, on_message, on_end):
    return PlainLine(path, on_message, on_end)
