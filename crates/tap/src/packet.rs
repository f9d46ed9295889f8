//! Packets, and the addresses of cards.

use std::fmt;
use std::str::FromStr;

/// Bytes of a `struct virtio_net_hdr` (linux/virtio_net.h), which says what is still to be done to
/// a packet: its checksum, and its division.
pub(crate) const HEADER_LEN: usize = 10;
// The kernel has the header in its own byte order.
const _: () = assert!(cfg!(target_endian = "little"));
/// Bytes of the two addresses and the type that an Ethernet frame begins with.
const ETHERNET_LEN: usize = 14;
/// The most bytes of a packet. A tap gets up to 64 KiB at once, and headers, where the guest's card
/// takes what is to be divided.
pub const PACKET_LIMIT: usize = 80 << 10;

/// A packet on its way to a guest: a `struct virtio_net_hdr` of 10 bytes, little-endian, and an
/// Ethernet frame.
///
/// ```
/// use godwit_tap::Packet;
///
/// let mut bytes = vec![0; 10];
/// bytes.extend([0x52, 0x54, 0, 0x12, 0x34, 0x56, 2, 0, 0, 0, 0, 1, 0x08, 0x00]);
/// let packet = Packet::of(bytes).expect("it has all of its headers");
/// assert_eq!(packet.to().to_string(), "52:54:00:12:34:56");
/// assert!(Packet::of(vec![0; 23]).is_none());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet(Vec<u8>);

impl Packet {
    /// The packet in these bytes, if they can be one.
    #[must_use]
    pub fn of(bytes: Vec<u8>) -> Option<Self> {
        let fits = HEADER_LEN + ETHERNET_LEN..=PACKET_LIMIT;
        fits.contains(&bytes.len()).then_some(Self(bytes))
    }

    /// The card that it is for.
    #[must_use]
    pub fn to(&self) -> Mac {
        let mut mac = [0; 6];
        mac.copy_from_slice(&self.0[HEADER_LEN..HEADER_LEN + 6]);
        Mac(mac)
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Its bytes, without a copy.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// The address of a card.
///
/// ```
/// use godwit_tap::Mac;
///
/// let mac: Mac = "52:54:00:ab:CD:ef".parse()?;
/// assert_eq!(mac, Mac([0x52, 0x54, 0, 0xab, 0xcd, 0xef]));
/// assert!("52:54:00:ab:cd".parse::<Mac>().is_err());
/// # Ok::<(), godwit_tap::NotAMac>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

/// What is no address of a card.
///
/// ```
/// use godwit_tap::{Mac, NotAMac};
///
/// assert_eq!("eth0".parse::<Mac>(), Err(NotAMac));
/// assert_eq!(NotAMac.to_string(), "no MAC address: use six bytes like 52:54:00:12:34:56");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAMac;

impl fmt::Display for NotAMac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no MAC address: use six bytes like 52:54:00:12:34:56")
    }
}

impl std::error::Error for NotAMac {}

impl FromStr for Mac {
    type Err = NotAMac;

    fn from_str(text: &str) -> Result<Self, NotAMac> {
        let mut mac = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut mac {
            let part = parts
                .next()
                .filter(|part| part.len() == 2 && part.bytes().all(|c| c.is_ascii_hexdigit()));
            *byte = part.and_then(|part| u8::from_str_radix(part, 16).ok()).ok_or(NotAMac)?;
        }
        if parts.next().is_none() { Ok(Self(mac)) } else { Err(NotAMac) }
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_address_is_none() {
        for text in ["", "52:54:00:12:34", "52:54:00:12:34:56:78", "+2:54:00:12:34:56", "é:00"] {
            assert_eq!(text.parse::<Mac>(), Err(NotAMac), "{text}");
        }
        assert_eq!("00:00:00:00:00:00".parse(), Ok(Mac([0; 6])));
    }

    #[test]
    fn a_packet_has_its_headers_and_is_no_longer_than_the_limit() {
        assert_eq!(Packet::of(vec![0; 23]), None);
        assert!(Packet::of(vec![0; 24]).is_some());
        assert!(Packet::of(vec![0; PACKET_LIMIT]).is_some());
        assert_eq!(Packet::of(vec![0; PACKET_LIMIT + 1]), None);
    }
}
