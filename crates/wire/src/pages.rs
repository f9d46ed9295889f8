//! Page frames: runs of pages of one RAM block or one disk, with their bytes or the word that they
//! are zero.
//!
//! The bytes come first and the run table last, so that a sender can read guest memory straight
//! into the frame before it knows which pages turn out to be zero:
//!
//! ```text
//!  header (aux: RAM block, codec) | bytes of all data runs, in order | run table: {start u64, count u32, content u32} …
//! ```
//!
//! With a codec, the bytes of all data runs are compressed as one. How many they become again
//! follows from the run table, which is never compressed: the codec has no say in it. Codecs are
//! numbers here; what they mean is for others.

use godwit_units::{PAGE_SIZE, PageBuffer, PageCount, PageIndex, PageRun};

use crate::WireError;
use crate::frame::{FrameHeader, FrameKind, HEADER_LEN, PAYLOAD_LIMIT, seal};

/// Pages whose bytes one frame may hold: 1 MiB. Larger than what stays in a core's caches for sure,
/// and still cheaper than smaller frames, since there are fewer system calls (docs/bulk.md).
pub const FRAME_PAGES: usize = 256;
/// Runs in one frame.
pub const RUNS_LIMIT: usize = 512;
/// Bytes of an entry in the run table.
pub const RUN_LEN: usize = 16;

const PAGE: usize = PAGE_SIZE as usize;
/// Pages that the longest run table takes.
const TABLE_PAGES: usize = (RUNS_LIMIT * RUN_LEN).div_ceil(PAGE);
const _: () = assert!(FRAME_PAGES * PAGE + RUNS_LIMIT * RUN_LEN <= PAYLOAD_LIMIT);

/// What is said about the pages of a run.
///
/// ```
/// use godwit_wire::Content;
///
/// let content = |page: &[u8]| {
///     if page.iter().all(|byte| *byte == 0) { Content::Zero } else { Content::Data }
/// };
/// assert_eq!([content(&[0; 4096]), content(&[1; 4096])], [Content::Zero, Content::Data]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Content {
    /// Their bytes are in the frame.
    Data = 0,
    /// They are zero: holes, or pages of zeros.
    Zero = 1,
}

/// A run as it stands in the run table.
///
/// ```
/// use godwit_units::PageRun;
/// use godwit_wire::{Content, WireRun};
///
/// let hole = WireRun { run: PageRun::new(101, 50), content: Content::Zero };
/// assert_eq!(hole.run.end().0, 151);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireRun {
    /// The pages.
    pub run: PageRun,
    /// What they hold.
    pub content: Content,
}

/// Builds page frames in one buffer that is used again and again.
///
/// ```
/// use godwit_units::PageRun;
/// use godwit_wire::{Content, HEADER_LEN, PageFrameBuilder, RUN_LEN, WireError};
///
/// let mut builder = PageFrameBuilder::new();
/// let page = [7; 4096];
/// builder.add(
///     PageRun::new(100, 1),
///     |bytes| Ok::<(), WireError>(bytes.copy_from_slice(&page)),
///     |_, _| Some(Content::Data),
/// )?;
/// builder.zero(PageRun::new(101, 50));
/// let frame = builder.finish(0);
/// assert_eq!(frame.len(), HEADER_LEN + 4096 + 2 * RUN_LEN);
/// assert!(builder.is_empty(), "and ready for the next");
/// # Ok::<(), WireError>(())
/// ```
#[derive(Debug)]
pub struct PageFrameBuilder {
    /// The frame, whose data begins at a page.
    buffer: PageBuffer,
    data: usize,
    runs: Vec<WireRun>,
}

impl Default for PageFrameBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl PageFrameBuilder {
    /// An empty frame.
    #[must_use]
    pub fn new() -> Self {
        Self {
            buffer: PageBuffer::new(PageCount((1 + FRAME_PAGES + TABLE_PAGES) as u64)),
            data: 0,
            runs: Vec::with_capacity(RUNS_LIMIT),
        }
    }

    /// Whether nothing was put in yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// How many more pages fit, whatever turns out to be in them.
    #[must_use]
    pub fn room(&self) -> usize {
        (FRAME_PAGES - self.data / PAGE).min(RUNS_LIMIT - self.runs.len())
    }

    /// Takes in the pages of `run`, at most [`Self::room`] of them: `read` fills in their bytes,
    /// and `judge` looks at each page and says what it goes in as: with its bytes, as zero and only
    /// named, or not at all. Returns how many went in.
    ///
    /// # Errors
    /// Those of `read`; the frame is then as it was.
    ///
    /// # Panics
    /// When there is no room for the run: a mistake of the caller.
    pub fn add<E>(
        &mut self,
        run: PageRun,
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
        mut judge: impl FnMut(PageIndex, &[u8]) -> Option<Content>,
    ) -> Result<Added, E> {
        assert!(run.count.0 <= self.room() as u64, "{} do not fit into the frame", run.count);
        let start = PAGE + self.data;
        let pages = run.count.0 as usize;
        read(&mut self.buffer[start..start + pages * PAGE])?;
        let mut added = Added::default();
        for index in 0..pages {
            let from = start + index * PAGE;
            let page = PageRun::new(run.start.0 + index as u64, 1);
            let Some(content) = judge(page.start, &self.buffer[from..from + PAGE]) else {
                continue;
            };
            self.push(page, content);
            match content {
                Content::Zero => added.zero += page.count,
                Content::Data => {
                    added.data += page.count;
                    let to = PAGE + self.data;
                    if from != to {
                        self.buffer.copy_within(from..from + PAGE, to);
                    }
                    self.data += PAGE;
                }
            }
        }
        Ok(added)
    }

    /// Says that the pages of `run` are zero; needs [`Self::room`] for one.
    pub fn zero(&mut self, run: PageRun) {
        self.push(run, Content::Zero);
    }

    fn push(&mut self, run: PageRun, content: Content) {
        debug_assert!(run.count.0 <= u64::from(u32::MAX), "a segment is far smaller");
        if let Some(last) = self.runs.last_mut() {
            let joins = last.content == content && last.run.end() == run.start;
            if joins && last.run.count.0 + run.count.0 <= u64::from(u32::MAX) {
                last.run.count += run.count;
                return;
            }
        }
        self.runs.push(WireRun { run, content });
    }

    /// The bytes of all data runs so far, in order.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.buffer[PAGE..PAGE + self.data]
    }

    /// Completes the frame for RAM block `block` and returns its bytes; the builder is empty
    /// afterwards.
    pub fn finish(&mut self, block: u32) -> &[u8] {
        let frame = &mut self.buffer[PAGE - HEADER_LEN..];
        complete(frame, self.data, &self.runs, block, 0);
        let length = HEADER_LEN + self.data + self.runs.len() * RUN_LEN;
        self.clear();
        &self.buffer[PAGE - HEADER_LEN..][..length]
    }

    /// Completes the frame in `other`, where behind room for the header ([`HEADER_LEN`]) stand the
    /// `length` bytes that codec number `codec` has made of [`Self::data`]; behind them must be
    /// room for [`RUNS_LIMIT`] entries of [`RUN_LEN`] bytes.
    ///
    /// # Panics
    /// When there is no such room: a mistake of the caller.
    pub fn finish_in<'o>(
        &mut self,
        other: &'o mut [u8],
        length: usize,
        block: u32,
        codec: u8,
    ) -> &'o [u8] {
        complete(other, length, &self.runs, block, codec);
        let length = HEADER_LEN + length + self.runs.len() * RUN_LEN;
        self.clear();
        &other[..length]
    }

    fn clear(&mut self) {
        self.runs.clear();
        self.data = 0;
    }
}

/// What of a run went into a frame.
///
/// ```
/// use godwit_units::{PageCount, PageRun};
/// use godwit_wire::{Content, PageFrameBuilder, WireError};
///
/// let mut builder = PageFrameBuilder::new();
/// let added = builder.add(
///     PageRun::new(0, 3),
///     |bytes| Ok::<(), WireError>(bytes.fill(7)),
///     |page, _| (page.0 != 1).then_some(Content::Data),
/// )?;
/// assert_eq!((added.data, added.zero), (PageCount(2), PageCount::ZERO));
/// # Ok::<(), WireError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Added {
    /// Pages with their bytes.
    pub data: PageCount,
    /// Pages that are zero.
    pub zero: PageCount,
}

/// Puts the run table behind `data` bytes of data and seals the frame.
fn complete(buffer: &mut [u8], data: usize, runs: &[WireRun], block: u32, codec: u8) {
    let end = HEADER_LEN + data + runs.len() * RUN_LEN;
    let entries = buffer[HEADER_LEN + data..end].chunks_exact_mut(RUN_LEN);
    for (entry, WireRun { run, content }) in entries.zip(runs) {
        entry[..8].copy_from_slice(&run.start.0.to_le_bytes());
        entry[8..12].copy_from_slice(&(run.count.0 as u32).to_le_bytes());
        entry[12..].copy_from_slice(&(*content as u32).to_le_bytes());
    }
    let aux = u64::from(codec) << 32 | u64::from(block);
    seal(&mut buffer[..end], FrameKind::Pages, runs.len() as u16, aux);
}

/// A received page frame whose checksum was found right.
///
/// ```
/// use godwit_units::PageRun;
/// use godwit_wire::{Content, FrameHeader, PageFrame, PageFrameBuilder, WireError};
///
/// let mut builder = PageFrameBuilder::new();
/// let page = [7; 4096];
/// builder.add(
///     PageRun::new(100, 1),
///     |bytes| Ok::<(), WireError>(bytes.copy_from_slice(&page)),
///     |_, _| Some(Content::Data),
/// )?;
/// builder.zero(PageRun::new(101, 50));
/// let frame = builder.finish(0);
/// let (header, payload) = frame.split_first_chunk().expect("a header");
/// let header = FrameHeader::decode(header)?;
/// header.verify(payload)?;
/// let frame = PageFrame::decode(&header, payload)?;
/// let runs: Vec<_> = frame.runs(frame.data).collect();
/// assert_eq!((runs[0].0.run, runs[0].1), (PageRun::new(100, 1), &page[..]));
/// assert_eq!((runs[1].0.run, runs[1].0.content), (PageRun::new(101, 50), Content::Zero));
/// # Ok::<(), WireError>(())
/// ```
#[derive(Debug)]
pub struct PageFrame<'a> {
    /// The index of the RAM block, as both sides numbered it.
    pub block: u32,
    /// The number of the codec that made [`Self::data`]; 0: they are the bytes of the pages.
    pub codec: u8,
    /// The bytes of all data runs, as the codec left them.
    pub data: &'a [u8],
    /// Bytes of all data runs: at most [`FRAME_PAGES`] pages.
    pub raw_len: usize,
    table: &'a [u8],
}

impl<'a> PageFrame<'a> {
    /// Takes a frame apart and checks that its run table and its data fit together.
    ///
    /// # Errors
    /// When they do not.
    pub fn decode(header: &FrameHeader, payload: &'a [u8]) -> Result<Self, WireError> {
        const WHAT: &str = "page frame";
        let field = |field, value| WireError::Field { what: WHAT, field, value };
        let block = header.aux as u32;
        let codec = u8::try_from(header.aux >> 32).map_err(|_| field("codec", header.aux >> 32))?;
        let table = usize::from(header.runs) * RUN_LEN;
        let data = payload.len().checked_sub(table).ok_or(WireError::Length { what: WHAT })?;
        let (data, table) = payload.split_at(data);
        let mut pages = 0u64;
        for entry in table.chunks_exact(RUN_LEN) {
            let start = u64_at(entry, 0);
            let run = PageRun::new(start, u32_at(entry, 8).into());
            if run.count.0 == 0 || start.checked_add(run.count.0).is_none() {
                return Err(field("run", start));
            }
            match u32_at(entry, 12) {
                0 => pages += run.count.0,
                1 => {}
                other => return Err(field("content", other.into())),
            }
        }
        if pages > FRAME_PAGES as u64 {
            return Err(field("pages", pages));
        }
        let raw_len = pages as usize * PAGE;
        if codec == 0 && raw_len != data.len() {
            return Err(WireError::Length { what: WHAT });
        }
        Ok(Self { block, codec, data, raw_len, table })
    }

    /// The first page that it says something of; 0 in an empty frame.
    #[must_use]
    pub fn first_page(&self) -> PageIndex {
        PageIndex(if self.table.is_empty() { 0 } else { u64_at(self.table, 0) })
    }

    /// The runs in order, each with its bytes out of `raw`, which are [`Self::raw_len`] bytes:
    /// [`Self::data`] where there is no codec, else what the codec makes of them. Those of a zero
    /// run are empty.
    ///
    /// # Panics
    /// When `raw` has another length: a mistake of the caller.
    pub fn runs<'b>(
        &self,
        raw: &'b [u8],
    ) -> impl Iterator<Item = (WireRun, &'b [u8])> + use<'a, 'b> {
        assert_eq!(raw.len(), self.raw_len, "the bytes of the data runs");
        let mut data = raw;
        self.table.chunks_exact(RUN_LEN).map(move |entry| {
            let run = PageRun::new(u64_at(entry, 0), u32_at(entry, 8).into());
            if u32_at(entry, 12) == 1 {
                return (WireRun { run, content: Content::Zero }, &data[..0]);
            }
            let (bytes, rest) = data.split_at(run.count.bytes().0 as usize);
            data = rest;
            (WireRun { run, content: Content::Data }, bytes)
        })
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}
