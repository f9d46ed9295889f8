//! Blocks of a file that stand for all of it: drawn at random from where data is, with more from
//! its beginning and its end.
//!
//! They find at once what is another image altogether, and on storage that is too slow for more.
//! Reading takes a fraction of a second at both sides; storage that is slower is sampled less. What
//! differs in a few places only, [`super::pieces`] looks for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::host_file::{BLOCK, HostFile};

/// Samples of one file.
const SAMPLES: u64 = 1024;
/// Of these, at either end of the data: what partition tables, superblocks and the newest clusters
/// of a growing image are in.
const AT_ENDS: u64 = 64;
/// Reads under way at a time.
const THREADS: usize = 8;
/// Stretches of data that are told apart.
pub(super) const STRETCHES: usize = 4096;
/// How long samples are read.
const BUDGET: Duration = Duration::from_millis(400);
/// A file that answers no read for so long hangs.
const HANGS: Duration = Duration::from_secs(5);

/// Where a block is, and its digest.
pub(super) type Sample = (u64, u64);

/// Draws and reads samples of `file`; `seed` changes with each migration.
///
/// # Errors
/// When it cannot be read, in words that follow its name.
pub(super) fn draw(file: &Arc<HostFile>, seed: u64) -> Result<Vec<Sample>, String> {
    let places = places(&file.data(STRETCHES), seed);
    read(file, places, BLOCK, BUDGET)
}

/// Reads `size` bytes at each of `places`, as many as `budget` allows: in their order, so that the
/// first ones stand for all.
///
/// # Errors
/// As [`draw`].
pub(super) fn read(
    file: &Arc<HostFile>,
    places: Vec<u64>,
    size: usize,
    budget: Duration,
) -> Result<Vec<Sample>, String> {
    let (done, outcome) = mpsc::channel();
    let file = Arc::clone(file);
    // Whoever reads from storage that hangs hangs with it, and cannot be ended.
    let read = move || {
        let _ = done.send(read_all(&file, &places, size, Instant::now() + budget));
    };
    let started = Builder::new().name("samples".to_owned()).spawn(read);
    started.map_err(|error| format!("cannot be read (no thread can be had: {error})"))?;
    match outcome.recv_timeout(HANGS + budget) {
        Ok(Ok(samples)) => Ok(samples),
        Ok(Err(error)) => Err(format!("cannot be read ({error})")),
        Err(_) => Err(format!("answers no read within {HANGS:?}")),
    }
}

fn read_all(
    file: &HostFile,
    places: &[u64],
    size: usize,
    until: Instant,
) -> std::io::Result<Vec<Sample>> {
    let next = AtomicUsize::new(0);
    let found = Mutex::new(Vec::with_capacity(places.len()));
    let work = || -> std::io::Result<()> {
        while Instant::now() < until {
            let Some(place) = places.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            let digest = file.digest(*place, size)?;
            found.lock().unwrap_or_else(PoisonError::into_inner).push((*place, digest));
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        // Threads that cannot be had leave their part to the others, and at last to this one.
        let start = |_| Builder::new().name("samples".to_owned()).spawn_scoped(scope, work);
        let threads: Vec<_> = (1..THREADS).map_while(|number| start(number).ok()).collect();
        let own = work();
        let ends = threads.into_iter().map(|thread| thread.join().unwrap_or(Ok(())));
        ends.chain([own]).collect::<std::io::Result<Vec<()>>>()
    })?;
    Ok(found.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Blocks of `stretches`, none twice, in an order that is random.
fn places(stretches: &[(u64, u64)], seed: u64) -> Vec<u64> {
    let block = BLOCK as u64;
    let counts = stretches.iter().map(|(start, end)| (start / block, end.div_ceil(block)));
    let counts: Vec<(u64, u64)> = counts.filter(|(first, end)| first < end).collect();
    let total: u64 = counts.iter().map(|(first, end)| end - first).sum();
    if total == 0 {
        return Vec::new();
    }
    // Block number `index` of all that are data.
    let place = |mut index: u64| {
        for (first, end) in &counts {
            if index < end - first {
                return (first + index) * block;
            }
            index -= end - first;
        }
        0
    };
    let mut rng = fastrand::Rng::with_seed(seed);
    let ends = AT_ENDS.min(total);
    let mut indices: Vec<u64> = (0..ends).chain(total - ends..total).collect();
    // One in each of as many parts of the same size.
    let parts = (SAMPLES - 2 * AT_ENDS).min(total);
    indices.extend((0..parts).map(|part| {
        let start = part * (total / parts);
        start + rng.u64(..(total / parts).max(1))
    }));
    indices.sort_unstable();
    indices.dedup();
    let mut places: Vec<u64> = indices.into_iter().map(place).collect();
    rng.shuffle(&mut places);
    places
}

#[cfg(test)]
mod tests {
    use super::super::host_file::tests::Scratch;
    use super::*;

    #[test]
    fn samples_are_of_data_only_and_reach_from_end_to_end() {
        let stretches = [(0, 4096), (1 << 30, (1 << 30) + (64 << 20)), (1 << 40, (1 << 40) + 100)];
        let chosen = places(&stretches, 7);
        assert!((800..=1024).contains(&chosen.len()), "{}", chosen.len());
        let inside = |at: &u64| stretches.iter().any(|(start, end)| (start..end).contains(&at));
        assert!(chosen.iter().all(inside));
        assert!([0, 1 << 40].iter().all(|at| chosen.contains(at)));
        assert_ne!(chosen, places(&stretches, 8));
        let mut sorted = chosen.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), chosen.len());
        assert!(places(&[], 1).is_empty() && places(&[(0, 0)], 1).is_empty());
        assert_eq!(places(&[(0, 1)], 1), [0]);
    }

    #[test]
    fn what_is_read_is_what_is_there() {
        let scratch = Scratch::new("samples", 1 << 20, &[(0, &[3; 300_000])]);
        let file = Arc::new(scratch.open());
        let samples = draw(&file, 1).unwrap();
        assert!(samples.len() >= 74, "{}", samples.len());
        assert!(samples.iter().all(|(at, digest)| file.digest(*at, BLOCK).unwrap() == *digest));
        assert!(samples.iter().any(|(at, digest)| *at < 290_000 && *digest != 0));
    }
}
