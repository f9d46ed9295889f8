//! Damage done on purpose to the work of a witness, to see that its own check tells of it.
//!
//! Keeps one promise: a witness has told only where the line with BUG is its own, and not one of
//! the stamps beside it. Nothing is moved here: what is damaged is what the witness has, in its
//! disk or in the guest's memory, by a hand from outside.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, Boot, DiskImage, GuestConfig, TestVm, VmConfig, Witness, builds_for, images_for,
};
use godwit_units::{ByteCount, PAGE_SIZE};

/// How long a guest has to come up, and a witness to tell.
const LIMIT: Duration = Duration::from_secs(120);
/// Between two blows.
const PAUSE: Duration = Duration::from_millis(250);
/// Pages that one blow damages, at most.
const PAGES: usize = 64;
const PAGE: usize = PAGE_SIZE as usize;
/// The bit of a page table's entry that maps a page (Intel SDM volume 3, 4.5).
const PRESENT: u64 = 1;
/// The disk of one that has one.
const DISK: ByteCount = ByteCount(32 << 20);

/// What was done to a witness, and what it said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// Its first line with BUG.
    pub line: String,
    /// Pages in which a bit was flipped until then.
    pub pages: usize,
    /// How long that took.
    pub after: Duration,
}

/// The witnesses that are damaged here: the others keep in the guest's page cache what they check.
pub const DAMAGED: [Witness; 2] = [Witness::Fio, Witness::Stress];

/// Starts a guest with `witness`, lets it find its work in order twice, and flips bits of it until
/// it tells; `None` where there is no such guest.
///
/// # Errors
/// When it does not come up, does not tell within two minutes, or somebody else tells.
pub fn damage(witness: Witness) -> anyhow::Result<Option<Told>> {
    let builds = builds_for("soak");
    let Some(build) = builds.iter().max_by_key(|build| build.version) else { return Ok(None) };
    if !witness.is_there_for("soak") || witness.has_disk() && !images_for("soak") {
        return Ok(None);
    }
    let memory = ByteCount(512 << 20);
    let guest = GuestConfig { memory, ..GuestConfig::small(Mode::Idle) };
    let mut config = VmConfig::new(build, guest)
        .with_backend(Backend::SharedFile)
        .with_boot(Boot::Witness(witness));
    let image = if witness.has_disk() { Some(DiskImage::create("raw", DISK)?) } else { None };
    if let Some(image) = &image {
        config = config.with_disk("disk0", image);
    }
    let mut vm = TestVm::source(&config)?;
    vm.wait_for_lines("two checks", (0, 2), LIMIT, |line| witness.is_clean(line))?;
    ensure!(vm.bugs().is_empty(), "it tells of damage that was not done: {:?}", vm.bugs());

    let (since, mut pages, mut random) = (Instant::now(), 0, fastrand::Rng::with_seed(1));
    while since.elapsed() < LIMIT {
        pages += match &image {
            Some(image) => strike_disk(&open(&image.path())?, &mut random)?,
            None => {
                vm.pause()?;
                let struck = strike_patterns(&open(vm.ram_file())?, &mut random)?;
                vm.resume()?;
                struck
            }
        };
        std::thread::sleep(PAUSE);
        if let Some(line) = vm.bugs().into_iter().next() {
            ensure!(line.contains(&format!("BUG {witness}:")), "somebody else tells: {line}");
            return Ok(Some(Told { line, pages, after: since.elapsed() }));
        }
    }
    bail!("it has not told of damage to {pages} pages within {} s", LIMIT.as_secs())
}

fn open(path: &Path) -> anyhow::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(path);
    file.with_context(|| format!("cannot open {}", path.display()))
}

/// Flips a bit of some blocks that were written; how many.
fn strike_disk(image: &File, random: &mut fastrand::Rng) -> anyhow::Result<usize> {
    let blocks = image.metadata()?.size() / PAGE_SIZE;
    let (mut block, mut struck) = ([0; PAGE], 0);
    for _ in 0..PAGES {
        let at = random.u64(..blocks) * PAGE_SIZE;
        image.read_exact_at(&mut block, at)?;
        if block.iter().any(|byte| *byte != 0) {
            flip(image, at, &block, random)?;
            struck += 1;
        }
    }
    Ok(struck)
}

/// Flips a bit of some pages that are one word all over, as stress-ng's patterns are and what a
/// kernel has is not; how many.
fn strike_patterns(ram: &File, random: &mut fastrand::Rng) -> anyhow::Result<usize> {
    let pages = ram.metadata()?.size() / PAGE_SIZE;
    let mut found = Vec::new();
    let mut page = [0; PAGE];
    for at in (0..pages).map(|page| page * PAGE_SIZE) {
        ram.read_exact_at(&mut page, at)?;
        if is_a_pattern(&page, pages) {
            found.push(at);
        }
    }
    random.shuffle(&mut found);
    found.truncate(PAGES);
    for at in &found {
        ram.read_exact_at(&mut page, *at)?;
        flip(ram, *at, &page, random)?;
    }
    Ok(found.len())
}

/// Whether a page is the same word all over, and that neither zero nor the entry of a page table:
/// one that maps the page of zeros everywhere, as where a process only reads, is the kernel's own.
fn is_a_pattern(page: &[u8; PAGE], pages: u64) -> bool {
    let (words, _) = page.as_chunks::<8>();
    let word = u64::from_le_bytes(words[0]);
    let frame = (word >> 12) & ((1 << 40) - 1);
    let maps = word & PRESENT != 0 && frame < pages;
    word != 0 && !maps && words.iter().all(|word| *word == words[0])
}

/// Flips one bit of what is `page` at `at`.
fn flip(file: &File, at: u64, page: &[u8; PAGE], random: &mut fastrand::Rng) -> anyhow::Result<()> {
    let byte = random.usize(..PAGE);
    let flipped = [page[byte] ^ 1 << random.u8(..8)];
    file.write_all_at(&flipped, at + byte as u64).context("cannot damage it")
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn a_page_of_one_word_is_a_pattern_and_one_of_zeros_is_none() {
        let mut page = [0x5a; PAGE];
        assert!(is_a_pattern(&page, 131_072));
        page[4000] ^= 1;
        assert!(!is_a_pattern(&page, 131_072));
        assert!(!is_a_pattern(&[0; PAGE], 131_072));
    }

    #[test]
    fn a_page_table_is_no_pattern_though_it_maps_one_page_all_over() {
        let table = |entry: u64| {
            let mut page = [0; PAGE];
            page.as_chunks_mut::<8>().0.fill(entry.to_le_bytes());
            page
        };
        // As the guest of a soak had it.
        let entry = 0x8000_0000_08eb_1225;
        assert!(!is_a_pattern(&table(entry), 131_072));
        assert!(is_a_pattern(&table(entry), 0x8eb1), "beyond its memory");
        assert!(is_a_pattern(&table(entry ^ PRESENT), 131_072));
    }

    #[test]
    fn what_is_damaged_differs_in_one_bit_of_each_page_that_held_something() {
        let file: File = memfd_create("pages", MemfdFlags::CLOEXEC).unwrap().into();
        file.set_len(8 * PAGE_SIZE).unwrap();
        file.write_all_at(&[0xff; PAGE], 3 * PAGE_SIZE).unwrap();
        let struck = strike_patterns(&file, &mut fastrand::Rng::with_seed(4)).unwrap();
        assert_eq!(struck, 1);
        let mut all = vec![0; 8 * PAGE];
        file.read_exact_at(&mut all, 0).unwrap();
        let bits: u32 = all.iter().map(|byte| byte.count_ones()).sum();
        assert_eq!(bits, 8 * 4096 - 1);
    }
}
