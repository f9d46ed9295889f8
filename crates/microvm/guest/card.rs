//! The card: a virtio network device (virtio 1.2, 5.1, as it is by ports), which answers who asks
//! for its address (RFC 826) and who pings it (RFC 792), and says the same to who talks with it
//! over one TCP connection at a time, at any port (RFC 9293). A client sees by it when the guest
//! runs.
//!
//! Nothing is sent again: the network between a guest and its switch loses nothing of what a guest
//! has sent, and what is lost on the way here the client sends again.
//!
//! Keeps one promise: what it has no answer for is thrown away.

use core::cell::UnsafeCell;

use crate::boot_block::{CARD_PORTS, CARD_SLOT};
use crate::ports::Ports;
use crate::virtio::{DEVICE_WRITES, Descriptor, Queue, Shared};

const NETWORK_CARD: u32 = 1;
const RECEIVE: u16 = 0;
const SEND: u16 = 1;
/// As many as QEMU's cards have if nothing else is said.
const PLACES: usize = 256;
const BUFFERS: usize = 32;
const BUFFER_LEN: usize = 2048;
/// What comes before each frame (`struct virtio_net_hdr`).
const HEADER_LEN: usize = 10;

/// Where in a frame the parts of a TCP segment are, without options of IP's.
const IP: usize = 14;
const TCP: usize = IP + 20;
const DATA: usize = TCP + 20;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;
/// The option by which segments may be as long as a frame has room for.
const LONGEST_SEGMENT: [u8; 4] = [2, 4, 0x05, 0xb4];

static RECEIVED: Queue<PLACES> = Queue::new();
static SENT: Queue<PLACES> = Queue::new();
static MEMORY: Shared<[[u8; BUFFER_LEN]; BUFFERS]> =
    Shared(UnsafeCell::new([[0; BUFFER_LEN]; BUFFERS]));

/// The device, and who it is on the network.
pub struct Card {
    ports: Ports,
    mac: [u8; 6],
    address: [u8; 4],
    /// So many frames were looked at.
    seen: u16,
    /// The numbers of the next bytes of the connection, from there and from here.
    theirs: u32,
    ours: u32,
}

impl Card {
    /// Brings up the one that has this address.
    pub fn start(address: u32) -> Self {
        let ports = Ports::begin(NETWORK_CARD, CARD_SLOT, CARD_PORTS);
        ports.show(RECEIVE, &RECEIVED);
        ports.show(SEND, &SENT);
        let mut mac = [0; 6];
        mac.copy_from_slice(&ports.config().to_le_bytes()[..6]);
        for number in 0..BUFFERS as u16 {
            // SAFETY: vCPU 0 alone, and the device has none of them yet.
            unsafe {
                let address = (*MEMORY.0.get())[usize::from(number)].as_ptr() as u64;
                let len = BUFFER_LEN as u32;
                RECEIVED
                    .describe(number, Descriptor { address, len, flags: DEVICE_WRITES, next: 0 });
                RECEIVED.add(number);
            }
        }
        ports.ready();
        ports.notify(RECEIVE);
        Self { ports, mac, address: address.to_be_bytes(), seen: 0, theirs: 0, ours: 0 }
    }

    /// Answers what has come.
    pub fn turn(&mut self) {
        // SAFETY: vCPU 0 alone. A buffer that the device has given back is ours until it is made
        // available again, and what is sent from it was taken by then.
        unsafe {
            while let Some((head, len)) = RECEIVED.given_back(self.seen) {
                self.seen = self.seen.wrapping_add(1);
                let buffer = &mut (*MEMORY.0.get())[usize::from(head) % BUFFERS];
                let (header, frame) = buffer.split_at_mut(HEADER_LEN);
                let len = (len as usize).clamp(HEADER_LEN, BUFFER_LEN) - HEADER_LEN;
                if let Some(len) = self.answer(frame, len) {
                    header.fill(0);
                    let (address, len) = (header.as_ptr() as u64, (HEADER_LEN + len) as u32);
                    SENT.describe(0, Descriptor { address, len, flags: 0, next: 0 });
                    SENT.add(0);
                    self.ports.notify(SEND);
                    SENT.await_all();
                }
                RECEIVED.add(head);
                self.ports.notify(RECEIVE);
            }
        }
    }

    /// Makes the answer to the frame of `len` bytes of it, if there is one; how long it is.
    fn answer(&mut self, frame: &mut [u8], len: usize) -> Option<usize> {
        let seen = &mut frame[..len];
        let len = match seen.get(12..14)? {
            [0x08, 0x06] => self.answer_who_has(seen)?,
            [0x08, 0x00] if seen.get(IP) == Some(&0x45) && seen.get(30..34)? == self.address => {
                match seen[23] {
                    1 => self.answer_echo(seen)?,
                    6 => self.answer_segment(frame, len)?,
                    _ => return None,
                }
            }
            _ => return None,
        };
        frame.copy_within(6..12, 0);
        frame[6..12].copy_from_slice(&self.mac);
        Some(len)
    }

    fn answer_who_has(&self, frame: &mut [u8]) -> Option<usize> {
        if frame.len() < 42 || frame[20..22] != [0, 1] || frame[38..42] != self.address {
            return None;
        }
        frame[21] = 2;
        frame.copy_within(22..32, 32);
        frame[22..28].copy_from_slice(&self.mac);
        frame[28..32].copy_from_slice(&self.address);
        Some(frame.len())
    }

    fn answer_echo(&self, frame: &mut [u8]) -> Option<usize> {
        if frame.get(TCP..TCP + 2)? != [8, 0] || frame.len() < TCP + 8 {
            return None;
        }
        // The sum of IP's header is the same when the addresses change places.
        self.send_back(frame);
        frame[TCP] = 0;
        let sum = u32::from(number16(frame, TCP + 2)) + 0x0800;
        put16(frame, TCP + 2, folded(sum));
        Some(frame.len())
    }

    /// The addresses of the answer to a packet.
    fn send_back(&self, frame: &mut [u8]) {
        frame.copy_within(26..30, 30);
        frame[26..30].copy_from_slice(&self.address);
    }

    /// What comes in its turn is said again, and acknowledged with that.
    fn answer_segment(&mut self, frame: &mut [u8], len: usize) -> Option<usize> {
        let end = (IP + usize::from(number16(frame, IP + 2))).min(len);
        if end < DATA {
            return None;
        }
        let from = TCP + usize::from(frame[TCP + 12] >> 4) * 4;
        let (flags, number) = (frame[TCP + 13], number32(frame, TCP + 4));
        let count = end.checked_sub(from).filter(|_| from >= DATA)?;
        let (answer, ours, data) = match &[FIN, SYN, RST].map(|flag| flags & flag != 0) {
            [_, _, true] => return None,
            // One that comes again begins nothing anew.
            [_, true, _] if self.ours == 1 || number.wrapping_add(1) != self.theirs => {
                (self.theirs, self.ours) = (number.wrapping_add(1), 1);
                frame[DATA..DATA + 4].copy_from_slice(&LONGEST_SEGMENT);
                (SYN | ACK, 0, LONGEST_SEGMENT.len())
            }
            [ends, ..] if number == self.theirs && (*ends || count > 0) => {
                frame.copy_within(from..end, DATA);
                let ours = self.ours;
                let fin = u32::from(*ends);
                self.theirs = number.wrapping_add(count as u32 + fin);
                self.ours = ours.wrapping_add(count as u32 + fin);
                (if *ends { FIN | ACK } else { PSH | ACK }, ours, count)
            }
            [false, ..] if count == 0 => return None,
            _ => (ACK, self.ours, 0),
        };
        let header = if answer & SYN != 0 { 6 } else { 5 };
        let end = DATA + data;
        self.send_back(frame);
        put16(frame, IP + 2, (end - IP) as u16);
        put16(frame, IP + 10, 0);
        put16(frame, IP + 10, !sum_of(&frame[IP..TCP], 0));
        let ports = [number16(frame, TCP + 2), number16(frame, TCP)];
        put16(frame, TCP, ports[0]);
        put16(frame, TCP + 2, ports[1]);
        frame[TCP + 4..TCP + 8].copy_from_slice(&ours.to_be_bytes());
        frame[TCP + 8..TCP + 12].copy_from_slice(&self.theirs.to_be_bytes());
        frame[TCP + 12..TCP + 14].copy_from_slice(&[header << 4, answer]);
        frame[TCP + 14..TCP + 20].copy_from_slice(&[0xff, 0xff, 0, 0, 0, 0]);
        // Of the addresses, the protocol and the length as well.
        let beside = sum_of(&frame[26..TCP], 6 + (end - TCP) as u32);
        put16(frame, TCP + 16, !sum_of(&frame[TCP..end], beside.into()));
        Some(end)
    }
}

fn number16(frame: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

fn number32(frame: &[u8], at: usize) -> u32 {
    u32::from(number16(frame, at)) << 16 | u32::from(number16(frame, at + 2))
}

fn put16(frame: &mut [u8], at: usize, value: u16) {
    frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// The sum of `bytes`, and of `more`, in words of 16 bits (RFC 1071).
fn sum_of(bytes: &[u8], more: u32) -> u16 {
    let mut sum = more;
    for word in bytes.chunks(2) {
        sum += u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0));
    }
    folded(sum)
}

fn folded(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}
