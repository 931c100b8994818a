"""The port for other nodes. Whoever reaches it can connect before showing a key, and each connection costs this process a descriptor.

So the socket is ours, and libzmq accepts on it: while too many are connected, a filter of the kernel drops what arrives for the listening
socket. Connections that exist go on. Closing the port would end them.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import socket
import struct

BACKLOG = 128
SPARE_DESCRIPTORS = 512  # for everything else that a monitor opens
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_…, asm-generic/socket.h
# struct sock_filter: BPF_RET, 0 bytes are kept
_DROP = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
_PROGRAM = struct.pack("@HP", 1, ctypes.addressof(_DROP))  # struct sock_fprog


class Port:
    """A listening socket that can be shut for a while."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._shut = False

    def open(self, address: str, number: int) -> None:
        """Listen at an address, "" for all, and port; 0: any.

        Raises:
            OSError: the port is taken, or the address is not one of this host.
        """
        self.close()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found = socket.getaddrinfo(
                address or "0.0.0.0", number, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST
            )
            listening.bind(found[0][4])  # with the scope of an IPv6 address
            listening.listen(BACKLOG)
            listening.setblocking(False)
        except OSError:
            listening.close()
            raise
        self._socket, self._shut = listening, False

    def for_libzmq(self) -> int:
        """Return a descriptor of the socket that libzmq closes."""
        assert self._socket is not None
        return self._socket.dup().detach()

    def shut(self, shut: bool) -> None:
        """Let nobody connect, or everybody again."""
        if self._socket is None or shut == self._shut:
            return
        option, value = (_ATTACH_FILTER, _PROGRAM) if shut else (_DETACH_FILTER, 0)
        with contextlib.suppress(OSError):  # a kernel without filters
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)
        self._shut = shut

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def allow_descriptors(connections: int) -> None:
    """Raise this process's limit of open files for so many connections, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
