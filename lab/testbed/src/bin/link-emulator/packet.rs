//! Packets as a TUN device hands them over: a header of virtio's, and an IPv4 packet that may stand
//! for many of TCP (segmentation is left to whoever sends it on, linux/virtio_net.h).
//!
//! Keeps one promise: the parts of a packet are what a network card would have made of it, so they
//! can be delayed and lost one by one.

use std::ops::Range;

/// `struct virtio_net_hdr`.
pub(crate) const HEADER: usize = 10;
/// What an Ethernet adds to each packet; a token bucket counts it, too.
const ETHERNET: usize = 14;

// In virtio's header.
const KIND: usize = 1;
const HEADERS_LEN: usize = 2;
const SEGMENT_LEN: usize = 4;
const TCP_V4: u8 = 1;
const ECN: u8 = 0x80;
// In IP's header, from its beginning.
const TOTAL_LEN: usize = 2;
const NUMBER: usize = 4;
const IP_SUM: usize = 10;
const ADDRESSES: Range<usize> = 12..20;
// In TCP's header, from its beginning.
const SEQUENCE: usize = 4;
const WORDS: usize = 12;
const FLAGS: usize = 13;
const TCP_SUM: usize = 16;
const FIN_AND_PUSH: u8 = 1 | 8;
const CONGESTION_REDUCED: u8 = 0x80;
const TCP: u32 = 6;

/// One packet, header of virtio's included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packet(Vec<u8>);

/// Where TCP's header is, where the data begins, and how long a segment's is.
struct Shape {
    tcp: usize,
    data: usize,
    segment: usize,
}

impl Packet {
    /// What was read from a device.
    pub(crate) fn read(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    /// What is written to a device.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// `None` of a packet that stands for itself alone.
    fn shape(&self) -> Option<Shape> {
        if self.0.get(KIND)? & !ECN != TCP_V4 {
            return None;
        }
        let tcp = HEADER + usize::from(self.0.get(HEADER)? & 15) * 4;
        let data = tcp + usize::from(self.0.get(tcp + WORDS)? >> 4) * 4;
        let segment =
            usize::from(u16::from_ne_bytes([self.0[SEGMENT_LEN], self.0[SEGMENT_LEN + 1]]));
        (segment > 0 && data < self.0.len()).then_some(Shape { tcp, data, segment })
    }

    /// For how many packets it stands.
    pub(crate) fn segments(&self) -> usize {
        self.shape().map_or(1, |it| (self.0.len() - it.data).div_ceil(it.segment))
    }

    /// Bytes on the wire: those of all its packets, with all their headers.
    pub(crate) fn wire_len(&self) -> usize {
        let all = self.0.len() - HEADER.min(self.0.len());
        let repeated = self.shape().map_or(0, |it| it.data - HEADER);
        all + repeated * (self.segments() - 1) + ETHERNET * self.segments()
    }

    /// Bytes on the wire of one of its packets.
    pub(crate) fn part_len(&self, number: usize) -> usize {
        let Some(Shape { data, segment, .. }) = self.shape() else { return self.wire_len() };
        let left = (self.0.len() - data).saturating_sub(number * segment);
        data - HEADER + left.min(segment) + ETHERNET
    }

    /// The packet that stands for these of its packets.
    pub(crate) fn part(&self, segments: Range<usize>) -> Self {
        let Some(Shape { tcp, data, segment }) = self.shape() else { return self.clone() };
        let count = self.segments();
        if segments == (0..count) {
            return self.clone();
        }
        let (from, to) =
            (segments.start * segment, (segments.end * segment).min(self.0.len() - data));
        let mut bytes = [&self.0[..data], &self.0[data + from..data + to]].concat();
        bytes[HEADERS_LEN..][..2].copy_from_slice(&((data - HEADER) as u16).to_ne_bytes());
        if segments.len() == 1 {
            bytes[KIND] = 0;
            bytes[SEGMENT_LEN..][..2].fill(0);
        }
        let len = (bytes.len() - HEADER) as u16;
        let ip = &mut bytes[HEADER..tcp];
        ip[TOTAL_LEN..][..2].copy_from_slice(&len.to_be_bytes());
        let number = u16::from_be_bytes([ip[NUMBER], ip[NUMBER + 1]]);
        let number = number.wrapping_add(segments.start as u16);
        ip[NUMBER..][..2].copy_from_slice(&number.to_be_bytes());
        ip[IP_SUM..][..2].fill(0);
        let whole = !fold(sum(ip));
        ip[IP_SUM..][..2].copy_from_slice(&whole.to_be_bytes());
        // The rest of this sum is left to who receives it, as before.
        let tcp_len = u32::from(len) - (tcp - HEADER) as u32;
        let begun = fold(sum(&ip[ADDRESSES]) + TCP + tcp_len);
        let head = &mut bytes[tcp..];
        let first = u32::from_be_bytes([
            head[SEQUENCE],
            head[SEQUENCE + 1],
            head[SEQUENCE + 2],
            head[SEQUENCE + 3],
        ]);
        head[SEQUENCE..][..4].copy_from_slice(&first.wrapping_add(from as u32).to_be_bytes());
        head[TCP_SUM..][..2].copy_from_slice(&begun.to_be_bytes());
        if segments.end < count {
            head[FLAGS] &= !FIN_AND_PUSH;
        }
        if segments.start > 0 {
            head[FLAGS] &= !CONGESTION_REDUCED;
        }
        Self(bytes)
    }
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum()
}

fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEQUENCE_OF_FIRST: u32 = 0xffff_ff00;

    /// Three and a half segments of a thousand bytes, with FIN, PSH, ACK and CWR.
    fn large() -> Packet {
        let mut bytes = vec![0; HEADER + 20 + 32 + 3500];
        bytes[KIND] = TCP_V4;
        bytes[SEGMENT_LEN..][..2].copy_from_slice(&1000_u16.to_ne_bytes());
        let ip = &mut bytes[HEADER..];
        ip[0] = 0x45;
        ip[NUMBER..][..2].copy_from_slice(&0xffff_u16.to_be_bytes());
        ip[ADDRESSES].copy_from_slice(&[198, 18, 0, 1, 198, 18, 0, 2]);
        ip[20 + WORDS] = 8 << 4;
        ip[20 + FLAGS] = FIN_AND_PUSH | CONGESTION_REDUCED | 16;
        ip[20 + SEQUENCE..][..4].copy_from_slice(&SEQUENCE_OF_FIRST.to_be_bytes());
        (0..3500).for_each(|at| ip[52 + at] = (at / 500) as u8);
        Packet(bytes)
    }

    #[test]
    fn a_large_packet_is_the_sum_of_its_segments() {
        let large = large();
        assert_eq!(large.segments(), 4);
        assert_eq!(large.wire_len(), 3500 + 4 * (52 + 14));
        let parts = [large.part(0..1), large.part(1..3), large.part(3..4)];
        assert_eq!(parts.iter().map(Packet::wire_len).sum::<usize>(), large.wire_len());
        assert_eq!((0..4).map(|number| large.part_len(number)).sum::<usize>(), large.wire_len());
        assert_eq!(parts.each_ref().map(Packet::segments), [1, 2, 1]);
        let data: Vec<u8> = parts.iter().flat_map(|part| part.0[HEADER + 52..].to_vec()).collect();
        assert_eq!(data, large.0[HEADER + 52..]);
        assert_eq!(large.part(0..4), large);
    }

    #[test]
    fn a_part_has_the_headers_that_it_would_have_had_alone() {
        let part = large().part(1..3);
        let ip = &part.0[HEADER..];
        assert_eq!(u16::from_be_bytes([ip[TOTAL_LEN], ip[TOTAL_LEN + 1]]), 2052);
        assert_eq!([ip[NUMBER], ip[NUMBER + 1]], [0, 0], "0xffff and one");
        assert_eq!(fold(sum(&ip[..20])), 0xffff, "the sum of the header is right");
        let sequence: [u8; 4] = ip[20 + SEQUENCE..][..4].try_into().unwrap();
        assert_eq!(u32::from_be_bytes(sequence), SEQUENCE_OF_FIRST.wrapping_add(1000));
        assert_eq!(ip[20 + FLAGS], 16, "neither the first nor the last");
        assert_eq!(part.0[KIND], TCP_V4);
        let last = large().part(3..4);
        assert_eq!((last.0[KIND], last.0[SEGMENT_LEN]), (0, 0), "it stands for itself");
        assert_eq!(last.0[HEADER + 20 + FLAGS], FIN_AND_PUSH | 16);
        assert_eq!(large().part(0..1).0[HEADER + 20 + FLAGS], CONGESTION_REDUCED | 16);
    }

    #[test]
    fn a_packet_alone_is_left_as_it_is() {
        let packet = Packet::read(&[0; HEADER + 84]);
        assert_eq!((packet.segments(), packet.wire_len()), (1, 84 + 14));
        assert_eq!(packet.part(0..1), packet);
        // What is cut off is no large packet.
        assert_eq!(Packet::read(&[0, TCP_V4]).segments(), 1);
    }
}
