//! Whether the destination finds the source's disks: those that stay must be the same storage at
//! both sides, those that move must not.
//!
//! Images are read as files, beside the QEMUs: the destination's QEMU must not open one yet, which
//! the source's writes (before 10.0 any export makes it do so). The same file is told by its
//! numbers, on one host; else its bytes are compared: samples first, then as much as some seconds
//! allow, which is all of an image that is not large. A block that differs is read again at both
//! sides until it is known to differ while the source's stands still, or not to follow where the
//! source's changes: the guest writes meanwhile.
//!
//! ```text
//!   host_file   a file or a block device, what it is, and blocks of it
//!   samples     which blocks stand for all of them
//!   pieces      all of them, or as many as time allows
//! ```

mod host_file;
mod pieces;
mod samples;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_engine::vm::{Ask, VmError};
use godwit_units::ByteCount;
use serde::{Deserialize, Serialize};

use super::{Question, put};
use crate::QemuError;
use crate::disks::{Drive, drives};
use crate::machine::Machine;
use crate::monitor::QmpError;
pub(crate) use host_file::Identity;
use host_file::{BLOCK, HostFile, Sameness};
use samples::Sample;

/// Blocks that are read again at a time.
const AGAIN: usize = 64;
/// How long the destination reads what the source has read.
const BUDGET: Duration = Duration::from_secs(2);
/// Before each time that blocks are read again: caches of network file systems lag behind.
const PAUSES: [Duration; 4] = [
    Duration::ZERO,
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(300),
];
/// So many samples say something.
const ENOUGH: usize = 16;
/// Disks that are compared.
const DISKS: usize = 256;
/// Images one behind the other, and what else makes up a disk.
const FILES: usize = 16;

/// What the source tells of its disks.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Disks {
    disks: Vec<Disk>,
    /// The operator says that those that stay are the same.
    shared: bool,
}

/// A disk of the guest that has a medium.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Disk {
    /// All its names, the best first.
    names: Vec<String>,
    size: u64,
    /// It moves along.
    moves: bool,
    /// What it is made of: the image, and those behind it.
    files: Vec<Storage>,
}

/// A file, a device, or something that is no file.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Storage {
    /// As QEMU calls it.
    name: String,
    /// Unless it cannot be read.
    identity: Option<Identity>,
}

impl Disk {
    fn of(machine: &Machine, drive: &Drive, moving: &[String]) -> Option<Self> {
        let medium = drive.medium.as_ref().filter(|_| drive.is_in_use())?;
        let storage =
            |name: &String| Storage { name: name.clone(), identity: identity_in(machine, name) };
        Some(Self {
            names: drive.names.clone(),
            size: medium.size.0,
            moves: moving.contains(&medium.node),
            files: medium.files.iter().take(FILES).map(storage).collect(),
        })
    }

    fn all(machine: &mut Machine, moving: &[String]) -> Result<Vec<Self>, QmpError> {
        let drives = drives(&mut *machine.qmp)?;
        Ok(drives.iter().filter_map(|drive| Self::of(machine, drive, moving)).take(DISKS).collect())
    }

    fn name(&self) -> String {
        super::differ::shown(self.names.first().map_or("", String::as_str))
    }

    /// The image here that the source's disk `theirs` is to be found in.
    fn counterpart<'a>(theirs: &Self, here: &'a [Self]) -> Option<&'a Self> {
        let named = |name: &String| here.iter().find(|disk| disk.names.contains(name));
        theirs.names.iter().find_map(named).or_else(|| here.iter().find(|disk| disk.is(theirs)))
    }

    /// Whether it is the same storage, by what can be seen without reading.
    fn is(&self, other: &Self) -> bool {
        let same = |(a, b): (&Storage, &Storage)| a.is(b);
        !self.files.is_empty()
            && self.files.len() == other.files.len()
            && self.files.iter().zip(&other.files).all(same)
    }
}

impl Storage {
    /// Whether it is the same storage, by what can be seen without reading.
    fn is(&self, other: &Self) -> bool {
        match (&self.identity, &other.identity) {
            (Some(own), Some(theirs)) => own.compare(theirs) == Sameness::Same,
            (None, None) => {
                // A server that both reach by one name, and none that each has for itself.
                let own = ["localhost", "127.0.0.1", "::1", "unix"];
                let far =
                    self.name.contains(':') && !own.iter().any(|word| self.name.contains(word));
                far && self.name == other.name
            }
            _ => false,
        }
    }
}

/// What the file or device `path` of this host is, if it can be looked at.
pub(crate) fn identity(path: &Path) -> Option<Identity> {
    HostFile::open_path(path).ok().map(|file| file.identity)
}

/// The same of what the QEMU of `machine` calls `name`.
pub(crate) fn identity_in(machine: &Machine, name: &str) -> Option<Identity> {
    HostFile::open(machine, name).ok().map(|file| file.identity)
}

/// What the source answers to [`Question::Disks`].
pub(super) fn tell(
    machine: &mut Machine,
    moving: &[String],
    shared: bool,
) -> Result<Disks, QmpError> {
    Ok(Disks { disks: Disk::all(machine, moving)?, shared })
}

/// The names of the source's disks that are here as well, as far as that shows without reading
/// them: of what both have told.
pub(crate) fn told(source: &[u8], here: &[u8]) -> Result<Vec<String>, QemuError> {
    let read = |told| serde_json::from_slice(told).map_err(|_| QemuError::Unclear("its disks"));
    let (source, here): (Disks, Disks) = (read(source)?, read(here)?);
    let there = source.disks.iter().filter(|disk| Disk::counterpart(disk, &here.disks).is_some());
    Ok(there.map(Disk::name).collect())
}

/// The file `file` of the disk `disk` here.
fn open(machine: &mut Machine, (disk, file): (usize, usize)) -> Result<Arc<HostFile>, String> {
    let disks = Disk::all(machine, &[]).map_err(|error| error.to_string())?;
    let storage = disks.get(disk).and_then(|disk| disk.files.get(file)).ok_or("does not exist")?;
    HostFile::open(machine, &storage.name).map(Arc::new)
}

/// What the source answers to [`Question::Samples`].
pub(super) fn sample(machine: &mut Machine, place: (usize, usize)) -> Result<Vec<Sample>, String> {
    let seed = RandomState::new().build_hasher().finish();
    samples::draw(&open(machine, place)?, seed)
}

/// What the source answers to [`Question::Again`].
pub(super) fn sample_again(
    machine: &mut Machine,
    place: (usize, usize),
    mut blocks: Vec<u64>,
) -> Result<Vec<Sample>, String> {
    blocks.truncate(AGAIN);
    samples::read(&open(machine, place)?, blocks, BLOCK, BUDGET)
}

/// What the source answers to [`Question::Data`].
pub(super) fn data(
    machine: &mut Machine,
    place: (usize, usize),
) -> Result<Vec<(u64, u64)>, String> {
    Ok(open(machine, place)?.data(samples::STRETCHES))
}

/// What the source answers to [`Question::Pieces`].
pub(super) fn read_pieces(
    machine: &mut Machine,
    place: (usize, usize),
    wanted: Vec<u64>,
) -> Result<Vec<Sample>, String> {
    pieces::read(&open(machine, place)?, wanted)
}

/// Compares the disks of the `source` with those of the machine here.
///
/// # Errors
/// When one that stays is another here or cannot be compared, or one that moves would be copied
/// onto itself.
pub(super) fn compare(
    machine: &mut Machine,
    source: &Disks,
    ask: &mut Ask<'_>,
) -> Result<(), VmError> {
    let here = Disk::all(machine, &[]).map_err(QemuError::from)?;
    let files = source.disks.iter().filter(|disk| !disk.moves).map(|disk| disk.files.len()).sum();
    let mut asked = Asked { machine, ask, time: pieces::TIME, files };
    for disk in source.disks.iter().filter(|disk| disk.moves) {
        let Some(own) = Disk::counterpart(disk, &here) else { continue };
        if asked.is_the_sources(own, &source.disks)? {
            let file = own.files.first().map_or(String::new(), |file| file.name.clone());
            return Err(QemuError::OntoItself { disk: disk.name(), file }.into());
        }
    }
    if source.shared {
        return Ok(());
    }
    let mut found = Vec::new();
    let mut names = Vec::new();
    for (number, disk) in source.disks.iter().enumerate().filter(|(_, disk)| !disk.moves) {
        if let Some(words) = asked.stays(number, disk, &here)? {
            found.push(words);
            names.push(disk.name());
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    let (mut words, more) = (found.join("; "), found.len());
    if words.len() > 2500 {
        words = format!("{}; and {} more", found[0], more - 1);
    }
    Err(QemuError::OtherStorage { words, names: names.join(",") }.into())
}

/// Whether two files hold the same.
#[derive(Debug, PartialEq, Eq)]
enum Content {
    Same,
    Differs,
}

struct Asked<'a, 'b> {
    machine: &'a mut Machine,
    ask: &'a mut Ask<'b>,
    /// What is left for comparing more than samples.
    time: Duration,
    /// Among so many files.
    files: usize,
}

impl Asked<'_, '_> {
    /// Whether what would be written is what the source has open.
    fn is_the_sources(&mut self, own: &Disk, source: &[Disk]) -> Result<bool, VmError> {
        let Some(storage) = own.files.first() else { return Ok(false) };
        let Some(identity) = &storage.identity else { return Ok(false) };
        for (disk, place) in source.iter().zip(0..) {
            for (file, layer) in disk.files.iter().zip(0..) {
                match file
                    .identity
                    .as_ref()
                    .map_or(Sameness::Unknown, |theirs| identity.compare(theirs))
                {
                    Sameness::Same => return Ok(true),
                    // Two may have the same name; what they hold tells. If that cannot be read, the
                    // name does.
                    Sameness::Alike => {
                        if !matches!(
                            self.content((place, layer), storage, Duration::ZERO)?,
                            Ok(Content::Differs)
                        ) {
                            return Ok(true);
                        }
                    }
                    Sameness::Unknown => {}
                }
            }
        }
        Ok(false)
    }

    /// Why the source's disk is not found here, if it is not.
    fn stays(
        &mut self,
        number: usize,
        disk: &Disk,
        here: &[Disk],
    ) -> Result<Option<String>, VmError> {
        let name = disk.name();
        let Some(own) = Disk::counterpart(disk, here) else {
            return Ok(Some(format!("disk '{name}' is not among the drives here")));
        };
        if own.size != disk.size {
            let (theirs, own) = (ByteCount(disk.size), ByteCount(own.size));
            return Ok(Some(format!("disk '{name}' has {theirs} at the source and {own} here")));
        }
        if own.is(disk) {
            return Ok(None);
        }
        let shown = |storage: &Storage| super::differ::shown(&storage.name);
        let names = |disk: &Disk| disk.files.first().map_or_else(|| "nothing".to_owned(), shown);
        if disk.files.is_empty() || disk.files.len() != own.files.len() {
            return Ok(Some(format!(
                "disk '{name}' is made of {} files at the source and {} here, which cannot be \
                 compared",
                disk.files.len(),
                own.files.len()
            )));
        }
        for (layer, (theirs, own)) in disk.files.iter().zip(&own.files).enumerate() {
            let share = self.time / u32::try_from(self.files.max(1)).unwrap_or(u32::MAX);
            self.files = self.files.saturating_sub(1);
            if own.is(theirs) {
                continue;
            }
            if theirs.identity.is_none() {
                let file = shown(theirs);
                return Ok(Some(format!("disk '{name}': {file} at the source cannot be compared")));
            }
            let began = Instant::now();
            let content = self.content((number, layer), own, share)?;
            self.time = self.time.saturating_sub(began.elapsed());
            match content {
                Ok(Content::Same) => {}
                Ok(Content::Differs) => {
                    let file = shown(theirs);
                    return Ok(Some(format!(
                        "disk '{name}' is {file} at the source; {} here holds something else",
                        shown(own)
                    )));
                }
                Err(why) => {
                    let file = names(disk);
                    let why = super::differ::shown(&why);
                    return Ok(Some(format!(
                        "disk '{name}' ({file} at the source) cannot be compared: {why}"
                    )));
                }
            }
        }
        Ok(None)
    }

    /// Whether the file at `place` of the source's holds what `own` does, or why that cannot be
    /// told. What samples do not tell is looked for during `time`.
    fn content(
        &mut self,
        place: (usize, usize),
        own: &Storage,
        time: Duration,
    ) -> Result<Result<Content, String>, VmError> {
        let file = match HostFile::open(self.machine, &own.name) {
            Ok(file) => Arc::new(file),
            Err(why) => return Ok(Err(format!("{} here {why}", own.name))),
        };
        let theirs: Result<Vec<Sample>, String> =
            put(&Question::Samples(place.0, place.1), self.ask, "a disk")?;
        let theirs = match theirs {
            Ok(theirs) => theirs,
            Err(why) => return Ok(Err(format!("it {why} at the source"))),
        };
        let found = match suspects(&file, &theirs) {
            Ok(suspects) => suspects,
            Err(why) => return Ok(Err(format!("{} here {why}", own.name))),
        };
        match self.settle(place, &file, found)? {
            Ok(Content::Same) if !time.is_zero() => self.compare_pieces(place, &file, time),
            settled => Ok(settled),
        }
    }

    /// Whether one of `suspects` is found to differ when it is looked at again.
    fn settle(
        &mut self,
        place: (usize, usize),
        file: &Arc<HostFile>,
        mut suspects: Vec<Suspect>,
    ) -> Result<Result<Content, String>, VmError> {
        for pause in PAUSES {
            suspects.truncate(AGAIN);
            if suspects.is_empty() {
                break;
            }
            std::thread::sleep(pause);
            let places: Vec<u64> = suspects.iter().map(|suspect| suspect.place).collect();
            match self.read_again(place, file, places)? {
                Ok((again, own)) => look_again(&mut suspects, &again, &own),
                Err(why) => return Ok(Err(why)),
            }
        }
        let differs = suspects.iter().any(Suspect::differs);
        Ok(Ok(if differs { Content::Differs } else { Content::Same }))
    }

    /// The blocks at `places`, at the source first and then here.
    fn read_again(
        &mut self,
        place: (usize, usize),
        file: &Arc<HostFile>,
        places: Vec<u64>,
    ) -> Result<Result<Both, String>, VmError> {
        let question = Question::Again(place.0, place.1, places.clone());
        let again: Result<Vec<Sample>, String> = put(&question, self.ask, "a disk")?;
        Ok(again.and_then(|again| Ok((again, samples::read(file, places, BLOCK, BUDGET)?))))
    }
}

/// What the source has read, and what was read here.
type Both = (Vec<Sample>, Vec<Sample>);

/// A block that was seen to differ, or that only one side has read so far.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Suspect {
    place: u64,
    /// The source's, as read last.
    source: Option<u64>,
    /// The one here, as read last.
    here: u64,
    /// How often they differed while the source's did not change.
    still: u32,
    /// How often the source's changed and the one here did not.
    left_behind: u32,
}

impl Suspect {
    fn differs(&self) -> bool {
        self.still >= 2 || self.left_behind >= 3
    }
}

/// The blocks of `theirs` that are others in `file`, and some that only `file` has data in.
///
/// # Errors
/// When too little can be read.
fn suspects(file: &Arc<HostFile>, theirs: &[Sample]) -> Result<Vec<Suspect>, String> {
    let places: Vec<u64> = theirs.iter().map(|(place, _)| *place).collect();
    let wanted = places.len().min(ENOUGH);
    let here: HashMap<u64, u64> = samples::read(file, places, BLOCK, BUDGET)?.into_iter().collect();
    if here.len() < wanted {
        return Err("is too slow to be looked at".to_owned());
    }
    let suspect = |place, source, here| Suspect { place, source, here, still: 0, left_behind: 0 };
    let other = |(place, source): &Sample| {
        let own = here.get(place).filter(|own| *own != source)?;
        Some(suspect(*place, Some(*source), *own))
    };
    let mut suspects: Vec<Suspect> = theirs.iter().filter_map(other).collect();
    let seed = RandomState::new().build_hasher().finish();
    let own = samples::draw(file, seed)?;
    let data = own.into_iter().filter(|(place, digest)| *digest != 0 && !here.contains_key(place));
    suspects.extend(data.map(|(place, digest)| suspect(place, None, digest)));
    Ok(suspects)
}

/// Takes in what was read once more, at the source first; those that are the same now are none any
/// more.
fn look_again(suspects: &mut Vec<Suspect>, source: &[Sample], here: &[Sample]) {
    let (source, here): (HashMap<u64, u64>, HashMap<u64, u64>) =
        (source.iter().copied().collect(), here.iter().copied().collect());
    suspects.retain_mut(|suspect| {
        let (Some(theirs), Some(own)) = (source.get(&suspect.place), here.get(&suspect.place))
        else {
            return true;
        };
        if theirs == own {
            return false;
        }
        if suspect.source == Some(*theirs) {
            suspect.still += 1;
        } else if suspect.source.is_some() && suspect.here == *own {
            suspect.left_behind += 1;
        }
        (suspect.source, suspect.here) = (Some(*theirs), *own);
        true
    });
}

#[cfg(test)]
mod tests {
    use super::host_file::tests::Scratch;
    use super::*;

    fn suspect(source: u64, here: u64) -> Suspect {
        Suspect { place: 0, source: Some(source), here, still: 0, left_behind: 0 }
    }

    fn after(first: (u64, u64), then: &[(u64, u64)]) -> Option<bool> {
        let mut suspects = vec![suspect(first.0, first.1)];
        then.iter()
            .for_each(|(source, here)| look_again(&mut suspects, &[(0, *source)], &[(0, *here)]));
        suspects.first().map(Suspect::differs)
    }

    #[test]
    fn a_block_differs_when_the_sources_stands_still_or_the_one_here_does_not_follow() {
        assert_eq!(after((1, 2), &[(1, 2), (1, 2)]), Some(true));
        assert_eq!(after((1, 2), &[(3, 2), (4, 2), (5, 2)]), Some(true));
        // A block that the guest writes all the time, seen now before and now after.
        assert_eq!(after((1, 2), &[(3, 4), (5, 6), (7, 8), (9, 10)]), Some(false));
        assert_eq!(after((1, 2), &[(1, 2), (3, 3)]), None);
        assert_eq!(after((1, 2), &[(2, 2)]), None);
    }

    #[test]
    fn a_copy_has_no_suspects_and_a_blank_image_has() {
        let data = [7; 200_000];
        let [a, b] = ["copy-a", "copy-b"].map(|name| Scratch::new(name, 1 << 20, &[(4096, &data)]));
        let blank = Scratch::new("copy-blank", 1 << 20, &[]);
        let file = Arc::new(a.open());
        let theirs = samples::draw(&file, 5).unwrap();
        assert_eq!(suspects(&Arc::new(b.open()), &theirs).unwrap(), []);
        assert!(suspects(&Arc::new(blank.open()), &theirs).unwrap().len() > 40);
        // The other way round: only the image here has data.
        let nothing: Vec<Sample> = samples::draw(&Arc::new(blank.open()), 5).unwrap();
        assert!(suspects(&file, &nothing).unwrap().len() > 40);
    }

    #[test]
    fn servers_are_the_same_by_one_name_unless_each_has_its_own() {
        let storage = |name: &str| Storage { name: name.to_owned(), identity: None };
        let same = |a: &str, b: &str| storage(a).is(&storage(b));
        assert!(
            same("rbd:pool/vm", "rbd:pool/vm") && same("nbd://nas:10809/vm", "nbd://nas:10809/vm")
        );
        assert!(!same("rbd:pool/vm", "rbd:pool/other") && !same("/dev/fdset/1", "/dev/fdset/1"));
        assert!(!same("nbd://localhost:10809/vm", "nbd://localhost:10809/vm"));
        assert!(!same("nbd+unix:///vm?socket=/run/s", "nbd+unix:///vm?socket=/run/s"));
    }
}
