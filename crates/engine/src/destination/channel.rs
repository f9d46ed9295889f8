//! A data channel at the destination: one thread that reads frames and places their pages, in
//! order.
//!
//! Invariant: no byte is placed before the checksum of its frame was found right. Whether a page
//! may come over this channel at all is for the [`PageSink`] behind it to say.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_codec::{CodecId, Decompressor};
use godwit_units::{PageBuffer, PageCount, PageRun};
use godwit_wire::{Content, FRAME_PAGES, FrameKind, HEADER_LEN, PageFrame, barrier_of};

use super::barriers::Barriers;
use super::fault::MadeUp;
use crate::EngineError;
use crate::cells::{Cell, Cells};
use crate::link::{FrameReader, wire_error};

pub(super) const PEER: &str = "source";

/// Where the pages of a channel go: memory or a disk.
pub(super) trait PageSink: Send {
    /// Refuses what must not come over this channel; `number` is the frame's.
    fn check(&self, number: usize) -> Result<(), EngineError>;

    /// Whether it is memory.
    fn is_memory(&self) -> bool {
        false
    }

    /// What frames call number `number`, in words.
    fn name(&self, number: usize) -> String;

    /// Places `run` of number `number`; `bytes` are those of a data run.
    fn place(
        &mut self,
        number: usize,
        run: PageRun,
        content: Content,
        bytes: &[u8],
    ) -> Result<(), EngineError>;

    /// A round has ended: nothing that comes later may be overtaken by what was placed. Behind the
    /// `last` one nothing comes.
    fn end_round(&mut self, last: bool) -> Result<(), EngineError>;

    /// The connections are lost: what was placed is to be so before anything else is.
    fn settle(&mut self) -> Result<(), EngineError>;

    /// The end of the round was told: there is time until the next one.
    fn rest(&mut self) -> Result<(), EngineError>;

    /// Nothing comes over the channel any more, which was told before.
    fn ended(&self) {}
}

/// The thread's state.
pub(super) struct Channel {
    pub(super) number: usize,
    pub(super) reader: FrameReader,
    pub(super) place: Box<dyn PageSink>,
    pub(super) received: Arc<AtomicU64>,
    pub(super) barriers: Arc<Barriers>,
    pub(super) decompressor: Decompressor,
    /// The bytes of the pages of a compressed frame.
    pub(super) pages: PageBuffer,
    pub(super) made_up: MadeUp,
    /// What it works in, and who knows what was tried there.
    pub(super) cell: Cell,
    pub(super) cells: Cells,
}

/// What is left of a channel whose connection has ended.
pub(super) struct Ended {
    pub(super) place: Box<dyn PageSink>,
    /// Frames that were placed, whole, barriers included.
    pub(super) placed: u64,
}

impl Channel {
    /// Places pages until the connection ends.
    pub(super) fn run(mut self) -> Ended {
        let mut placed = 0;
        let error = match self.cell.enter() {
            Ok(_confined) => loop {
                match self.frame() {
                    Ok(()) => placed += 1,
                    Err(error) => break error,
                }
            },
            Err(error) => error,
        };
        self.barriers.failed(error);
        self.place.ended();
        Ended { place: self.place, placed }
    }

    /// Takes one frame.
    fn frame(&mut self) -> Result<(), EngineError> {
        let (header, payload) = self.reader.frame()?;
        self.received.fetch_add((HEADER_LEN + header.length) as u64, Ordering::Relaxed);
        match header.kind {
            FrameKind::Barrier if header.length == 0 => {
                let (round, last) = barrier_of(header.aux).map_err(wire_error(PEER))?;
                self.place.end_round(last)?;
                self.barriers.reached(self.number, round.into());
                return self.place.rest();
            }
            FrameKind::Pages => {}
            other => {
                let what = format!("it sent {other:?} on a data channel");
                return Err(EngineError::Protocol { peer: PEER, what });
            }
        }
        let frame = PageFrame::decode(&header, payload).map_err(wire_error(PEER))?;
        let number = frame.block as usize;
        self.place.check(number)?;
        self.made_up.delay(self.number);
        let raw = if frame.codec == 0 {
            frame.data
        } else {
            let of = || self.place.name(number);
            let corrupt =
                |source| EngineError::Corrupt { of: of(), page: frame.first_page(), source };
            let codec = CodecId::from_wire(frame.codec).map_err(corrupt)?;
            self.pages.fit(PageCount(FRAME_PAGES as u64).bytes());
            let pages = &mut self.pages[..frame.raw_len];
            self.decompressor.decompress(codec, frame.data, pages).map_err(corrupt)?;
            pages
        };
        for (wire_run, bytes) in frame.runs(raw) {
            self.place.place(number, wire_run.run, wire_run.content, bytes)?;
        }
        self.made_up.trespass();
        self.cells.tried().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use godwit_memory::RamBlock;
    use godwit_units::{PAGE_SIZE, PageCount, PageIndex};
    use godwit_wire::PageFrameBuilder;

    use super::super::claims::Claims;
    use super::super::memory::MemoryPlace;
    use super::super::slips::Slips;
    use super::super::{Faults, Options};
    use super::*;
    use crate::address::Stream;
    use crate::link::barrier;

    fn block() -> Arc<Vec<RamBlock>> {
        Arc::new(vec![RamBlock::anonymous("ram", PageCount(4)).unwrap()])
    }

    /// Which channel a segment may come over.
    #[derive(Clone)]
    enum Check {
        Own,
        Claimed(Arc<Claims>),
        /// A fault: any at any time.
        Broken,
    }

    /// Channel `number` of `channels`, which reads from `stream`.
    fn channel(
        number: usize,
        channels: usize,
        stream: UnixStream,
        blocks: &Arc<Vec<RamBlock>>,
        barriers: &Arc<Barriers>,
        check: Check,
    ) -> Channel {
        let cells = Cells::new(true, "the source").unwrap();
        let place = MemoryPlace {
            number,
            channels,
            claims: if let Check::Claimed(claims) = &check {
                Some(Arc::clone(claims))
            } else {
                None
            },
            rounds: 0,
            blocks: Arc::clone(blocks),
            order: Arc::new(vec![0]),
            placed: None,
            read_back: PageBuffer::default(),
            arriving: Arc::default(),
            closed: Arc::default(),
            slips: Slips::new(MadeUp::none()),
            unchecked: matches!(check, Check::Broken),
        };
        Channel {
            number,
            reader: FrameReader::new(Stream::from(stream), PEER),
            place: Box::new(place),
            received: Arc::default(),
            barriers: Arc::clone(barriers),
            decompressor: Decompressor::new(),
            pages: PageBuffer::default(),
            made_up: MadeUp::of(&Options::default()),
            cell: cells.memory(blocks).unwrap(),
            cells,
        }
    }

    /// Sends page 1, which belongs to channel 0, twice: first the old version over `first`, then
    /// the new one over `second`. Channel 0 is late. Returns what the page holds in the end, and
    /// the error of a channel, if there was one.
    fn race(first: usize, second: usize, check: Check) -> (u8, Option<EngineError>) {
        let slow_channel = Some((0, Duration::from_millis(400)));
        let faults = Faults { slow_channel, ..Faults::default() };
        let late = Options { faults, ..Options::default() };
        let blocks = block();
        let barriers = Arc::new(Barriers::new(2));
        let mut sending = Vec::new();
        let mut threads = Vec::new();
        for number in 0..2 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            sending.push(ours);
            let mut channel = channel(number, 2, theirs, &blocks, &barriers, check.clone());
            channel.made_up = MadeUp::of(&late);
            threads.push(std::thread::spawn(move || channel.run()));
        }
        let mut builder = PageFrameBuilder::new();
        for (channel, version) in [(first, 1), (second, 2)] {
            let fill = |bytes: &mut [u8]| {
                bytes.fill(version);
                Ok::<(), ()>(())
            };
            builder.add(PageRun::new(1, 1), fill, |_, _| Some(Content::Data)).unwrap();
            sending[channel].write_all(builder.finish(0)).unwrap();
        }
        // The channels end when there is nothing more to read; that is an error, too, behind any
        // other.
        drop(sending);
        threads.into_iter().for_each(|thread| drop(thread.join().unwrap()));
        let mut bytes = [0; PAGE_SIZE as usize];
        blocks[0].read(PageIndex(1), &mut bytes).unwrap();
        let failure =
            barriers.failure().filter(|error| matches!(error, EngineError::Protocol { .. }));
        (bytes[0], failure)
    }

    #[test]
    fn an_old_page_lands_on_a_newer_one_only_where_the_mapping_is_broken() {
        // As it is: one channel, in order, however late it is.
        let (version, failure) = race(0, 0, Check::Own);
        assert!(failure.is_none());
        assert_eq!(version, 2);
        // The newer one comes over another channel: it is refused, and the migration with it.
        let (_, failure) = race(0, 1, Check::Own);
        assert!(failure.unwrap().to_string().contains("over channel 1"));
        // Where it may come over any, only over one in a round: the late one is refused.
        let claimed = || Check::Claimed(Arc::new(Claims::new([PageCount(4)].into_iter())));
        let (_, failure) = race(0, 1, claimed());
        assert!(failure.unwrap().to_string().contains("over channel 0"));
        let (version, failure) = race(1, 1, claimed());
        assert!(failure.is_none() && version == 2, "{version} {failure:?}");
        // With the check broken on purpose the old version stays.
        let (version, failure) = race(0, 1, Check::Broken);
        assert!(failure.is_none());
        assert_eq!(version, 1);
    }

    #[test]
    fn a_segment_may_come_over_another_channel_in_the_next_round() {
        let (blocks, barriers) = (block(), Arc::new(Barriers::new(2)));
        let check = Check::Claimed(Arc::new(Claims::new([PageCount(4)].into_iter())));
        let mut builder = PageFrameBuilder::new();
        let mut send = |stream: &mut UnixStream, version| {
            let fill = |bytes: &mut [u8]| {
                bytes.fill(version);
                Ok::<(), ()>(())
            };
            builder.add(PageRun::new(1, 1), fill, |_, _| Some(Content::Data)).unwrap();
            stream.write_all(builder.finish(0)).unwrap();
        };
        let start = |number| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let channel = channel(number, 2, theirs, &blocks, &barriers, check.clone());
            (ours, std::thread::spawn(move || channel.run()))
        };
        let [(mut one, first), (mut other, second)] = [start(0), start(1)];
        send(&mut one, 1);
        one.write_all(&barrier(0, false)).unwrap();
        other.write_all(&barrier(0, false)).unwrap();
        barriers.wait(0, || None).unwrap();
        send(&mut other, 2);
        other.write_all(&barrier(1, false)).unwrap();
        one.write_all(&barrier(1, false)).unwrap();
        barriers.wait(1, || None).unwrap();
        let mut bytes = [0; PAGE_SIZE as usize];
        blocks[0].read(PageIndex(1), &mut bytes).unwrap();
        assert_eq!(bytes[0], 2);
        drop((one, other));
        [first, second].into_iter().for_each(|thread| drop(thread.join().unwrap()));
    }

    #[test]
    fn a_corrupt_compressed_frame_names_block_and_page() {
        let blocks = block();
        let barriers = Arc::new(Barriers::new(1));
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let channel = channel(0, 1, theirs, &blocks, &barriers, Check::Own);
        let thread = std::thread::spawn(move || channel.run());
        let mut builder = PageFrameBuilder::new();
        builder.zero(PageRun::new(2, 1));
        builder
            .add(
                PageRun::new(3, 1),
                |bytes| {
                    bytes.fill(7);
                    Ok::<(), ()>(())
                },
                |_, _| Some(Content::Data),
            )
            .unwrap();
        // The frame's checksum is right; what the codec finds is not what it makes.
        let mut other = vec![0x55; HEADER_LEN + 40 + 512 * 16];
        ours.write_all(builder.finish_in(&mut other, 40, 0, CodecId::Lz4 as u8)).unwrap();
        thread.join().unwrap();
        let error = barriers.failure().unwrap().to_string();
        assert!(error.contains("RAM block 'ram'") && error.contains("page 2"), "{error}");
        let mut bytes = [1; PAGE_SIZE as usize];
        blocks[0].read(PageIndex(3), &mut bytes).unwrap();
        assert_eq!(bytes, [0; PAGE_SIZE as usize], "nothing was placed");
    }
}
