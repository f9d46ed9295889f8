//! The two packet sockets (packet(7)).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use socket2::{Domain, SockAddr, SockFilter, Socket, Type};

use crate::packet::{Mac, PACKET_LIMIT, Packet};

/// Bytes that an outlet asks to have room for; the kernel gives what `net.core.rmem_max` allows.
const ROOM: usize = 4 << 20;
/// What inlets mark their packets by.
const MARK: u32 = 0x676f_6477;

// linux/if_packet.h.
const SOL_PACKET: libc::c_int = 263;
const PACKET_VNET_HDR: libc::c_int = 15;
const PACKET_OUTGOING: u32 = 4;

/// A copy of what is sent to one card through an interface.
///
/// ```no_run
/// use godwit_tap::{Mac, Outlet};
///
/// let mut outlet = Outlet::of("vnet0", Mac([0x52, 0x54, 0, 0x12, 0x34, 0x56]))?;
/// outlet.open()?;
/// assert!(outlet.take()?.is_none(), "nothing was sent since");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Outlet {
    socket: Socket,
    interface: u32,
    /// Room for a packet.
    bytes: Box<[u8]>,
}

impl Outlet {
    /// One for what `interface`, of the calling thread's network namespace, is sent for `card`.
    /// Nothing is copied before [`Self::open`].
    ///
    /// # Errors
    /// Without CAP_NET_RAW, and when there is no such interface.
    pub fn of(interface: &str, card: Mac) -> io::Result<Self> {
        let (socket, interface) = open(interface)?;
        socket.attach_filter(&sent_to(card))?;
        // No more than the kernel allows; less is no reason to go without.
        let _ = socket.set_recv_buffer_size(ROOM);
        Ok(Self { socket, interface, bytes: vec![0; PACKET_LIMIT].into() })
    }

    /// Begins to copy. Takes some ten microseconds.
    ///
    /// # Errors
    /// When the interface has gone.
    pub fn open(&self) -> io::Result<()> {
        bind(&self.socket, self.interface, libc::ETH_P_ALL)
    }

    /// The next packet, if there is one; poll(2) says when there is. What there was no room for is
    /// not told of.
    ///
    /// # Errors
    /// When the interface has gone, or is down.
    pub fn take(&mut self) -> io::Result<Option<Packet>> {
        loop {
            // TRUNC: the length that it has, whatever there is room for.
            match recv(&self.socket, &mut self.bytes[..], RecvFlags::TRUNC) {
                Ok((_, length)) => {
                    let packet = self.bytes.get(..length).map(<[u8]>::to_vec);
                    if let Some(packet) = packet.and_then(Packet::of) {
                        return Ok(Some(packet));
                    }
                }
                Err(Errno::AGAIN) => return Ok(None),
                // One of a kind of segmentation that the header has no number for.
                Err(Errno::INTR | Errno::INVAL) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Outlet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A way into an interface, to whoever reads it.
///
/// ```no_run
/// use godwit_tap::{Inlet, Packet};
///
/// let packet = Packet::of(vec![0; 60]).expect("it is long enough");
/// Inlet::of("vnet1")?.put(&packet)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Inlet(Socket);

impl Inlet {
    /// One into `interface`, of the calling thread's network namespace.
    ///
    /// # Errors
    /// Without CAP_NET_RAW, and when there is no such interface.
    pub fn of(interface: &str) -> io::Result<Self> {
        let (socket, interface) = open(interface)?;
        // Of no protocol: it hears nothing.
        bind(&socket, interface, 0)?;
        // No outlet takes it for what a network has sent. Kernels before 5.17 want CAP_NET_ADMIN.
        let _ = socket.set_mark(MARK);
        Ok(Self(socket))
    }

    /// Puts a packet into the interface. It waits there for its reader as any other does, and is
    /// lost where too many wait.
    ///
    /// # Errors
    /// When the interface has gone or is down, and when it is no packet.
    pub fn put(&self, packet: &Packet) -> io::Result<()> {
        send(&self.0, packet.bytes(), SendFlags::DONTWAIT)?;
        Ok(())
    }
}

/// A packet socket that hears nothing yet, and the number of `interface`.
fn open(interface: &str) -> io::Result<(Socket, u32)> {
    // Close-on-exec, and never waits.
    let socket = Socket::new(Domain::PACKET, Type::RAW, None)?;
    socket.set_nonblocking(true)?;
    let number = name_to_index(socket.as_fd(), interface)?;
    let on: libc::c_int = 1;
    // SAFETY: the socket is open, and the value is an int of that length.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            SOL_PACKET,
            PACKET_VNET_HDR,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    if set == 0 { Ok((socket, number)) } else { Err(io::Error::last_os_error()) }
}

/// Ties a packet socket to an interface, and to the packets of a protocol; 0: to none.
fn bind(socket: &Socket, interface: u32, protocol: libc::c_int) -> io::Result<()> {
    // SAFETY: the storage is large enough for any address and is all zero, which is an address of
    // this kind; all of it that means something is written, and its length told.
    let (_, address) = unsafe {
        SockAddr::try_init(|storage, length| {
            let address = storage.cast::<libc::sockaddr_ll>();
            (*address).sll_family = libc::AF_PACKET as u16;
            (*address).sll_protocol = (protocol as u16).to_be();
            (*address).sll_ifindex = interface.cast_signed();
            *length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            Ok(())
        })
    }?;
    socket.bind(&address)
}

/// A filter (kernel's Documentation/networking/filter.rst) for what a network sends to `card`
/// through an interface, without a VLAN tag beside it. Where a test fails it goes on with the last
/// line.
fn sent_to(card: Mac) -> [SockFilter; 12] {
    const BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
    const HALF: u16 = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
    const WORD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let beside = |what: libc::c_int| (libc::SKF_AD_OFF + what).cast_unsigned();
    let load = |width, from| SockFilter::new(width, 0, 0, from);
    let else_to_the_last = |value, lines| SockFilter::new(IF_EQUAL, 0, lines, value);
    let [a, b, c, d, e, f] = card.0;
    [
        load(BYTE, beside(libc::SKF_AD_PKTTYPE)),
        else_to_the_last(PACKET_OUTGOING, 9),
        load(WORD, beside(libc::SKF_AD_MARK)),
        SockFilter::new(IF_EQUAL, 7, 0, MARK),
        load(BYTE, beside(libc::SKF_AD_VLAN_TAG_PRESENT)),
        else_to_the_last(0, 5),
        load(WORD, 0),
        else_to_the_last(u32::from_be_bytes([a, b, c, d]), 3),
        load(HALF, 4),
        else_to_the_last(u16::from_be_bytes([e, f]).into(), 1),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
        SockFilter::new(RETURN, 0, 0, 0),
    ]
}
