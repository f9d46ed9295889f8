//! What keeps the host busy beside the VMs: processors, memory and a file on its disk.
//!
//! Keeps two promises: each thread works for a share of the time and no longer, so that a machine
//! of
//! few processors still moves its VMs; and file and threads go with the value.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;

/// One part of work in four of time.
const WORK: Duration = Duration::from_millis(20);
const REST: Duration = Duration::from_millis(60);
/// Memory that is written all the time.
const MEMORY: usize = 128 << 20;
/// A file that is written and synced all the time.
const CHUNK: usize = 1 << 20;
const CHUNKS: u32 = 64;

/// Which part of the host is kept busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// A thread for each processor
    Cpu,
    /// 128 MiB that are written over and over
    Memory,
    /// 64 MiB of a file that are written and synced
    Io,
}

/// Load that lasts as long as this value.
#[derive(Debug)]
pub struct Load {
    ending: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    file: Option<PathBuf>,
}

impl Load {
    /// Begins it.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn start(kinds: &[Kind]) -> anyhow::Result<Self> {
        let mut load = Self { ending: Arc::default(), threads: Vec::new(), file: None };
        if kinds.contains(&Kind::Cpu) {
            let processors = std::thread::available_parallelism().map_or(1, usize::from);
            for _ in 0..processors {
                let mut number = 1_u64;
                load.spawn(move || number = std::hint::black_box(number.wrapping_mul(5) + 1));
            }
        }
        if kinds.contains(&Kind::Memory) {
            let (mut memory, mut at) = (vec![0_u8; MEMORY], 0);
            load.spawn(move || {
                memory[at..at + CHUNK].fill(std::hint::black_box(at.to_le_bytes()[2]));
                at = (at + CHUNK) % MEMORY;
            });
        }
        if kinds.contains(&Kind::Io) {
            let path = std::env::temp_dir().join(format!("godwit-soak-{}", std::process::id()));
            let created = File::create(&path);
            let mut file = created.with_context(|| format!("cannot create {}", path.display()))?;
            load.file = Some(path);
            let (chunk, mut number) = (vec![7; CHUNK], 0);
            load.spawn(move || {
                let begins = number % CHUNKS == 0;
                number += 1;
                // A full disk makes less load, and is nobody's fault.
                let _ = if begins { file.seek(SeekFrom::Start(0)).map(drop) } else { Ok(()) };
                let _ = file.write_all(&chunk).and_then(|()| file.sync_data());
            });
        }
        Ok(load)
    }

    /// Does `piece` again and again, for a quarter of the time.
    fn spawn(&mut self, mut piece: impl FnMut() + Send + 'static) {
        let ending = Arc::clone(&self.ending);
        self.threads.push(std::thread::spawn(move || {
            while !ending.load(Ordering::Relaxed) {
                let since = Instant::now();
                while since.elapsed() < WORK {
                    piece();
                }
                std::thread::sleep(REST);
            }
        }));
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_it_goes_with_the_value() -> anyhow::Result<()> {
        let load = Load::start(&[Kind::Cpu, Kind::Memory, Kind::Io])?;
        let file = load.file.clone().context("no file")?;
        let until = Instant::now() + Duration::from_secs(30);
        while std::fs::metadata(&file)?.len() < CHUNK as u64 && Instant::now() < until {
            std::thread::sleep(REST);
        }
        assert!(std::fs::metadata(&file)?.len() >= CHUNK as u64);
        drop(load);
        assert!(!file.exists());
        Ok(())
    }
}
