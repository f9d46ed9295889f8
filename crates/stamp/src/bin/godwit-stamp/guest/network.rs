//! The network card: it is given an address and switched on, the kernel answers pings by itself,
//! and a thread repeats to clients what they say.
//!
//! Without a tool in the image the kernel is asked over a netlink socket (rtnetlink(7)), in two
//! messages. Only the first card is used. What is sent on it beyond answers is the kernel's doing.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use godwit_stamp::settings::{CardAddress, ECHO_PORT};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, bind, recv, send, socket};

const CARD: &str = "/sys/class/net/eth0/ifindex";
/// A card shows up some time after its driver.
const PATIENCE: Duration = Duration::from_secs(10);

// rtnetlink(7), netlink(7), linux/if.h.
const NLMSG_ERROR: u16 = 2;
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
/// NLM_F_REQUEST and NLM_F_ACK, and to create what is not there (NLM_F_CREATE).
const REQUEST: u16 = 0x1 | 0x4;
const CREATE: u16 = 0x400;
const IFF_UP: u32 = 1;
const AF_INET: u8 = 2;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;

/// Gives the card its address, if there is one to give.
pub(super) fn start(address: Option<CardAddress>) -> Result<(), Box<dyn Error>> {
    let Some(CardAddress { host, prefix }) = address else { return Ok(()) };
    let card = card()?;
    // Protocol 0 is NETLINK_ROUTE.
    let socket = socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    bind(&socket, &SocketAddrNetlink::new(0, 0))?;
    // struct ifinfomsg: family and type, the card, its flags and which of them are meant.
    let up = [[0; 4], card.to_ne_bytes(), IFF_UP.to_ne_bytes(), IFF_UP.to_ne_bytes()].concat();
    ask(&socket, RTM_NEWLINK, REQUEST, &up)
        .map_err(|error| format!("the card stays off: {error}"))?;
    // struct ifaddrmsg, and the address twice, as of a network that has more than two ends.
    let mut named = [[AF_INET, prefix, 0, 0], card.to_ne_bytes()].concat();
    for kind in [IFA_LOCAL, IFA_ADDRESS] {
        named.extend(8_u16.to_ne_bytes());
        named.extend(kind.to_ne_bytes());
        named.extend(host.octets());
    }
    ask(&socket, RTM_NEWADDR, REQUEST | CREATE, &named)
        .map_err(|error| format!("the card does not take {host}/{prefix}: {error}"))?;
    let listener = TcpListener::bind((host, ECHO_PORT))?;
    std::thread::Builder::new().name("echo".to_owned()).spawn(move || {
        // Whatever becomes of a client, the next one is served.
        listener.incoming().flatten().for_each(|client| drop(repeat(client)));
    })?;
    Ok(())
}

/// Says what a client says, until it has said all (RFC 862).
fn repeat(mut client: TcpStream) -> io::Result<()> {
    client.set_nodelay(true)?;
    let mut bytes = [0; 16 << 10];
    loop {
        let length = client.read(&mut bytes)?;
        if length == 0 {
            return Ok(());
        }
        client.write_all(&bytes[..length])?;
    }
}

/// The number of the first card, once it is there.
fn card() -> Result<u32, Box<dyn Error>> {
    let began = Instant::now();
    loop {
        match std::fs::read_to_string(Path::new(CARD)) {
            Ok(number) => return Ok(number.trim().parse()?),
            Err(_) if began.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(10)),
            Err(_) => return Err("there is an address, and no network card with a driver".into()),
        }
    }
}

/// Sends one message and waits for the kernel's word on it.
fn ask(socket: &OwnedFd, kind: u16, flags: u16, payload: &[u8]) -> io::Result<()> {
    let length = 16 + payload.len() as u32;
    let mut message = length.to_ne_bytes().to_vec();
    message.extend([kind.to_ne_bytes(), flags.to_ne_bytes()].concat());
    // The number of the request and of the one who makes it: nobody else uses this socket.
    message.extend([0; 8]);
    message.extend(payload);
    send(socket, &message, SendFlags::empty())?;
    let mut answer = [0; 4096];
    let (_, length) = recv(socket, &mut answer[..], RecvFlags::empty())?;
    let word = |at: usize| answer[..length].get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    let is_word = answer[4..6] == NLMSG_ERROR.to_ne_bytes();
    match word(16).map(i32::from_ne_bytes).filter(|_| is_word) {
        Some(0) => Ok(()),
        Some(error) => Err(io::Error::from_raw_os_error(-error)),
        None => Err(io::Error::other("the kernel answers something else")),
    }
}
