//! The network of a guest: a UDP socket that gets every frame that its card sends.

use std::io::ErrorKind;
use std::net::UdpSocket;

use anyhow::Context;

/// Of a RARP frame, by which QEMU says where a card is (RFC 903; QEMU's net/announce.c).
const RARP: [u8; 2] = 0x8035_u16.to_be_bytes();

/// The other end of a guest's card.
#[derive(Debug)]
pub struct Network {
    socket: UdpSocket,
    /// QEMU's end.
    port: u16,
}

impl Network {
    /// A network for one machine at a time.
    ///
    /// # Errors
    /// When there are no ports.
    pub fn listen() -> anyhow::Result<Self> {
        let socket = UdpSocket::bind("127.0.0.1:0").context("cannot listen")?;
        socket.set_nonblocking(true)?;
        let port = UdpSocket::bind("127.0.0.1:0")?.local_addr()?.port();
        Ok(Self { socket, port })
    }

    /// What QEMU is told so that the guest has a card in it.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let here = self.socket.local_addr().map_or(0, |address| address.port());
        let back_end =
            format!("socket,id=net,udp=127.0.0.1:{here},localaddr=127.0.0.1:{}", self.port);
        ["-netdev", &back_end, "-device", "virtio-net-pci,netdev=net"].map(str::to_owned).into()
    }

    /// How often the card was announced since the last call.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn announcements(&self) -> anyhow::Result<usize> {
        let (mut frame, mut count) = ([0; 2048], 0);
        loop {
            match self.socket.recv(&mut frame) {
                Ok(length) => count += usize::from(length >= 14 && frame[12..14] == RARP),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(count),
                Err(error) => return Err(error).context("cannot receive"),
            }
        }
    }
}
