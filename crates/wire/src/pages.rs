//! Page frames: runs of pages of one RAM block, with their bytes or the word that they are zero.
//!
//! The bytes come first and the run table last, so that a sender can read guest memory straight into the frame
//! before it knows which pages turn out to be zero:
//!
//! ```text
//!  header (aux: RAM block) | bytes of all data runs, in order | run table: {start u64, count u32, content u32} …
//! ```

use godwit_units::{PAGE_SIZE, PageCount, PageRun};

use crate::WireError;
use crate::frame::{FrameHeader, FrameKind, HEADER_LEN, PAYLOAD_LIMIT, seal};

/// Pages whose bytes one frame may hold: 256 KiB, which stays in a core's second-level cache from the read of
/// guest memory over checksum to socket.
pub const FRAME_PAGES: usize = 64;
/// Runs in one frame.
pub const RUNS_LIMIT: usize = 512;
/// Bytes of an entry in the run table.
pub const RUN_LEN: usize = 16;

const PAGE: usize = PAGE_SIZE as usize;
const _: () = assert!(FRAME_PAGES * PAGE + RUNS_LIMIT * RUN_LEN <= PAYLOAD_LIMIT);

/// What is said about the pages of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Content {
    /// Their bytes are in the frame.
    Data = 0,
    /// They are zero: holes, or pages of zeros.
    Zero = 1,
}

/// A run as it stands in the run table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireRun {
    /// The pages.
    pub run: PageRun,
    /// What they hold.
    pub content: Content,
}

/// Builds page frames in one buffer that is used again and again.
#[derive(Debug)]
pub struct PageFrameBuilder {
    buffer: Vec<u8>,
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
            buffer: vec![0; HEADER_LEN + FRAME_PAGES * PAGE + RUNS_LIMIT * RUN_LEN],
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

    /// Takes in the pages of `run`, at most [`Self::room`] of them: `read` fills in their bytes, and those that
    /// turn out to be zero are left out and only named. Returns how many were zero.
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
    ) -> Result<PageCount, E> {
        assert!(run.count.0 <= self.room() as u64, "{} do not fit into the frame", run.count);
        let start = HEADER_LEN + self.data;
        let pages = run.count.0 as usize;
        read(&mut self.buffer[start..start + pages * PAGE])?;
        let mut zero = PageCount::ZERO;
        for index in 0..pages {
            let from = start + index * PAGE;
            let page = PageRun::new(run.start.0 + index as u64, 1);
            if is_zero(&self.buffer[from..from + PAGE]) {
                zero += page.count;
                self.push(page, Content::Zero);
                continue;
            }
            let to = HEADER_LEN + self.data;
            if from != to {
                self.buffer.copy_within(from..from + PAGE, to);
            }
            self.data += PAGE;
            self.push(page, Content::Data);
        }
        Ok(zero)
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

    /// Completes the frame for RAM block `block` and returns its bytes; the builder is empty afterwards.
    pub fn finish(&mut self, block: u32) -> &[u8] {
        let mut end = HEADER_LEN + self.data;
        for WireRun { run, content } in &self.runs {
            let entry = &mut self.buffer[end..end + RUN_LEN];
            entry[..8].copy_from_slice(&run.start.0.to_le_bytes());
            entry[8..12].copy_from_slice(&(run.count.0 as u32).to_le_bytes());
            entry[12..].copy_from_slice(&(*content as u32).to_le_bytes());
            end += RUN_LEN;
        }
        let runs = self.runs.len() as u16;
        self.runs.clear();
        self.data = 0;
        let frame = &mut self.buffer[..end];
        seal(frame, FrameKind::Pages, runs, block.into());
        frame
    }
}

/// A received page frame whose checksum was found right.
#[derive(Debug)]
pub struct PageFrame<'a> {
    /// The index of the RAM block, as both sides numbered it.
    pub block: u32,
    data: &'a [u8],
    table: &'a [u8],
}

impl<'a> PageFrame<'a> {
    /// Takes a frame apart and checks that its run table and its data fit together.
    ///
    /// # Errors
    /// When they do not.
    pub fn decode(header: &FrameHeader, payload: &'a [u8]) -> Result<Self, WireError> {
        const WHAT: &str = "page frame";
        let block = u32::try_from(header.aux).map_err(|_| WireError::Field {
            what: WHAT,
            field: "block",
            value: header.aux,
        })?;
        let table = usize::from(header.runs) * RUN_LEN;
        let data = payload.len().checked_sub(table).ok_or(WireError::Length { what: WHAT })?;
        let (data, table) = payload.split_at(data);
        let frame = Self { block, data, table };
        let mut pages = 0u64;
        for entry in frame.table.chunks_exact(RUN_LEN) {
            let start = u64_at(entry, 0);
            let run = PageRun::new(start, u32_at(entry, 8).into());
            if run.count.0 == 0 || start.checked_add(run.count.0).is_none() {
                return Err(WireError::Field { what: WHAT, field: "run", value: start });
            }
            match u32_at(entry, 12) {
                0 => pages += run.count.0,
                1 => {}
                other => {
                    return Err(WireError::Field { what: WHAT, field: "content", value: other.into() });
                }
            }
        }
        if pages.checked_mul(PAGE_SIZE) != Some(data.len() as u64) {
            return Err(WireError::Length { what: WHAT });
        }
        Ok(frame)
    }

    /// The runs in order, each with its bytes; those of a zero run are empty.
    pub fn runs(&self) -> impl Iterator<Item = (WireRun, &'a [u8])> + '_ {
        let mut data = self.data;
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

/// Whether all of `bytes` are zero; ends at the first block that is not.
fn is_zero(bytes: &[u8]) -> bool {
    // Blocks of a few cache lines: the inner fold has no branch and becomes vector code.
    bytes.chunks(256).all(|block| block.iter().fold(0, |sum, byte| sum | byte) == 0)
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
