//! The images of disks that move along, at a destination that libvirt owns: they are filled before
//! any QEMU may have them.
//!
//! ```text
//!   open     an image that is not there is made; a qemu-nbd opens it for writing
//!   …        libvirt starts its QEMU, which opens the images and leaves them (BDRV_O_INACTIVE)
//!   close    the last round is on storage; each qemu-nbd lets go of its image and ends
//!   …        QEMU loads the device state, and looks at its images anew (bdrv_activate)
//! ```
//!
//! A qemu-nbd knows the formats, locks what it writes to, so that the source's own image is
//! refused, and ends with its last connection, thus with this process.
//!
//! Invariant: nothing is written to an image that the operator has not allowed, and what was made
//! for a guest that did not come is removed, by this process or by who stands in for it.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_disk::{Disk, DiskChoice, DiskReader, DiskSink};
use godwit_nbd::{ALLOCATION, Address, Link, Wish};
use godwit_units::ByteCount;
use serde::{Deserialize, Serialize};

use super::made::Made;
use super::xml;
use crate::QemuError;
use crate::compare::{self, Identity};
use crate::disks::{Pool, Pooled, Reader, Sink, reading};
use crate::mark::Mark;
use crate::run_directory;

/// For qemu-nbd to open an image.
const OPEN_LIMIT: Duration = Duration::from_secs(20);
/// For it to let go of one whose writes are on storage.
const CLOSE_LIMIT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(2);
/// Of a program's complaints, so much is told.
const WORDS: u64 = 2000;

/// A disk that moves along, as the source tells of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Moving {
    /// Its target, by which libvirt's users know it.
    pub(super) name: String,
    pub(super) size: u64,
    /// What its image is on the source's host, where that can be seen.
    pub(super) identity: Option<Identity>,
}

/// Where disks are to be at the destination, by name, where that is not where the source has them.
pub type DiskPaths = Vec<(String, PathBuf)>;

fn refused(words: String) -> QemuError {
    QemuError::Domain(words)
}

/// One image.
#[derive(Debug)]
struct Image {
    disk: Disk,
    path: PathBuf,
    server: Option<Child>,
    sink: Option<Sink>,
    /// A connection by which it is read.
    reader: Pool,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Images {
    all: Vec<Image>,
    made: Made,
}

impl Images {
    /// Opens an image for each disk that moves, and has the descriptions name those of this host.
    /// What is there already is taken if the operator has named it, or the domain's definition of
    /// this host, `ours`, has that disk there; the source's word alone does not do.
    ///
    /// # Errors
    /// What stands against it, with the cure. Nothing is left of it then.
    pub(super) fn open(
        moving: &[Moving],
        descriptions: [Option<&mut String>; 2],
        allowed: &DiskChoice,
        paths: &DiskPaths,
        ours: Option<&str>,
    ) -> Result<Self, QemuError> {
        let [Some(running), mut kept] = descriptions else { return Ok(Self::default()) };
        if let Some((name, _)) = paths.iter().find(|(name, _)| !is_among(moving, name)) {
            return Err(refused(format!(
                "--disk {name}=PATH: the source sends no disk of that name; those that come are \
                 {}",
                names(moving)
            )));
        }
        let mut images = Self::default();
        for disk in moving {
            let there =
                xml::place(running, &disk.name).map_err(|why| immovable(&disk.name, why))?;
            allowed.allow(&disk.name, &[])?;
            let own = paths.iter().find(|(name, _)| *name == disk.name);
            let path = own.map_or(&there.path, |(_, path)| path).clone();
            let ours = ours.and_then(|xml| xml::place(xml, &disk.name).ok());
            let may_be_there = own.is_some() || ours.is_some_and(|ours| ours.path == path);
            let opened = match path.exists() && !may_be_there {
                true => Err(unnamed(disk, &path)),
                false => Image::open(disk, &path, &there, &mut images.made),
            };
            match opened {
                Ok(image) => images.all.push(image),
                Err(error) => {
                    images.discard();
                    return Err(error);
                }
            }
            for xml in [Some(&mut *running), kept.as_deref_mut()].into_iter().flatten() {
                *xml = xml::moved(xml, &disk.name, &there.path, &path);
            }
        }
        Ok(images)
    }

    /// Where `wanted` is written to.
    ///
    /// # Errors
    /// When these are other disks than the source has told of.
    pub(super) fn sinks(&mut self, wanted: &[Disk]) -> Result<Vec<Box<dyn DiskSink>>, QemuError> {
        let told: Vec<&Disk> = self.all.iter().map(|image| &image.disk).collect();
        if told.len() != wanted.len() || told.iter().zip(wanted).any(|(a, b)| *a != b) {
            return Err(QemuError::Changed("other disks came than the source had told of"));
        }
        let sinks = self.all.iter_mut().filter_map(|image| image.sink.take());
        Ok(sinks.map(|sink| Box::new(sink) as Box<dyn DiskSink>).collect())
    }

    /// Reads all images.
    ///
    /// # Errors
    /// When one is being read already.
    pub(super) fn read(&self) -> Result<Vec<Box<dyn DiskReader>>, QemuError> {
        self.all.iter().map(Image::read).collect()
    }

    /// Lets go of all images, to which everything was written.
    ///
    /// # Errors
    /// When a qemu-nbd does not, or complains.
    pub(super) fn close(&mut self) -> Result<(), QemuError> {
        self.all.iter_mut().try_for_each(Image::close)
    }

    /// Lets go of them, and removes those that were made.
    pub(super) fn discard(&mut self) {
        for mut image in self.all.drain(..) {
            image.end();
        }
        self.made.remove();
    }

    /// From here on they are the guest's: nobody removes them.
    ///
    /// # Errors
    /// When that cannot be written down.
    pub(super) fn keep(&mut self) -> Result<(), QemuError> {
        self.made.keep()
    }
}

fn unnamed(disk: &Moving, path: &Path) -> QemuError {
    if compare::identity(path).zip(disk.identity.as_ref()).is_some_and(|(a, b)| a.may_be(b)) {
        return onto_itself(&disk.name, path);
    }
    refused(format!(
        "{} is there already, where disk '{name}' is at the source, and no domain of this host's \
         has it as that disk: if it may be overwritten, --disk {name}={}; if not, another PATH",
        path.display(),
        path.display(),
        name = disk.name
    ))
}

fn is_among(moving: &[Moving], name: &str) -> bool {
    moving.iter().any(|disk| disk.name == name)
}

fn names(moving: &[Moving]) -> String {
    let names: Vec<&str> = moving.iter().map(|disk| disk.name.as_str()).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn immovable(name: &str, why: &str) -> QemuError {
    refused(format!(
        "disk '{name}' {why}, and cannot move along with a domain of libvirt's: put it on storage \
         that both hosts have"
    ))
}

impl Image {
    fn open(
        disk: &Moving,
        path: &Path,
        there: &xml::Placed,
        made: &mut Made,
    ) -> Result<Self, QemuError> {
        let (name, size) = (&disk.name, ByteCount(disk.size));
        let failed = |error: io::Error| {
            refused(format!("the image {} for disk '{name}': {error}", path.display()))
        };
        let kind = match std::fs::metadata(path) {
            Ok(about) => Some(about.file_type()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        if let Some(kind) = kind.filter(|kind| kind.is_block_device() != there.is_device) {
            let (is, has) = if kind.is_block_device() {
                ("a block device", "a file")
            } else {
                ("no block device", "a block device")
            };
            return Err(refused(format!(
                "{} for disk '{name}' is {is}, and the domain has {has}: name another by --disk \
                 {name}=PATH",
                path.display()
            )));
        }
        if kind.is_none() && there.is_device {
            return Err(refused(format!(
                "there is no block device {} for disk '{name}': make one of {} bytes, or name \
                 another by --disk {name}=PATH",
                path.display(),
                size.0
            )));
        }
        let theirs = disk.identity.as_ref();
        if kind.is_some() && compare::identity(path).zip(theirs).is_some_and(|(a, b)| a.may_be(b)) {
            return Err(onto_itself(name, path));
        }
        if kind.is_none() {
            let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
            made.add(path, &file.map_err(failed)?)?;
            fill(path, there.format, size).map_err(failed)?;
        }
        let disk = Disk { name: name.clone(), size };
        let mut image =
            Self { disk, path: path.to_owned(), server: None, sink: None, reader: Pool::default() };
        image.serve(there.format).map(|()| image)
    }

    /// Has a qemu-nbd open the image, and connects to it.
    fn serve(&mut self, format: &str) -> Result<(), QemuError> {
        let directory = Directory::make()?;
        let socket = directory.0.join("nbd");
        let mut command = Command::new("qemu-nbd");
        command.args(["--format", format, "--cache", "writeback", "--discard", "unmap"]);
        command.arg("--socket").arg(&socket).args(["--export-name", &self.disk.name]);
        // One that writes and one that reads; it ends with the last of them.
        command.args(["--shared", "2"]);
        command.arg(&self.path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let started = command.spawn().map_err(|error| not_started("qemu-nbd", &error))?;
        self.server = Some(started);
        let until = Instant::now() + OPEN_LIMIT;
        // It listens first, and opens the image before it answers.
        let link = loop {
            let wish = Wish::new(&self.disk.name).with_context(ALLOCATION).writable();
            let connected = Link::connect(Address::Unix(socket.clone()), wish);
            let Err(error) = connected else { break connected? };
            if self.server.as_mut().is_some_and(|server| ends_within(server, PAUSE)) {
                return Err(self.refused_by_server());
            }
            if Instant::now() >= until {
                return Err(error.into());
            }
        };
        let here = ByteCount(link.export().size);
        if here != self.disk.size {
            return Err(refused(format!(
                "disk '{}' has {} bytes at the source and its image {} has {} here: remove it, \
                 and godwit makes it anew, or name another by --disk {}=PATH",
                self.disk.name,
                self.disk.size.0,
                self.path.display(),
                here.0,
                self.disk.name
            )));
        }
        let reader = Link::connect(Address::Unix(socket), reading(&self.disk.name))?;
        self.reader = Arc::new(Mutex::new(Some(reader)));
        self.sink = Some(Sink::new(link, here));
        Ok(())
    }

    fn failed(&self, what: &str) -> QemuError {
        let (name, path) = (&self.disk.name, self.path.display());
        refused(format!("the image {path} for disk '{name}': {what}"))
    }

    /// Why the server has ended, in its words.
    fn refused_by_server(&mut self) -> QemuError {
        let said = self.server.as_mut().map(complaint).unwrap_or_default();
        if said.contains("Failed to get") && said.contains("lock") {
            return refused(format!(
                "the image {} for disk '{}' is in use: end that, or name another by --disk \
                 {}=PATH; if it is the source's own, both hosts have it: leave --disks out and \
                 give --disks-are-shared ({said})",
                self.path.display(),
                self.disk.name,
                self.disk.name
            ));
        }
        self.failed(&said)
    }

    fn read(&self) -> Result<Box<dyn DiskReader>, QemuError> {
        let link = self.take_reader().ok_or_else(|| self.failed("it is being read already"))?;
        let link = Pooled::new(&self.disk.name, link, &self.reader);
        Ok(Box::new(Reader::new(self.disk.clone(), link)))
    }

    fn take_reader(&self) -> Option<Link> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn close(&mut self) -> Result<(), QemuError> {
        (self.sink, _) = (None, self.take_reader());
        let Some(mut server) = self.server.take() else { return Ok(()) };
        if !ends_within(&mut server, CLOSE_LIMIT) {
            let _ = server.kill();
            let _ = server.wait();
            return Err(self.failed("qemu-nbd does not let go of it"));
        }
        match server.wait() {
            Ok(status) if status.success() => Ok(()),
            _ => Err(self.failed(&complaint(&mut server))),
        }
    }

    fn end(&mut self) {
        (self.sink, _) = (None, self.take_reader());
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        self.end();
    }
}

fn onto_itself(name: &str, path: &Path) -> QemuError {
    refused(format!(
        "disk '{name}' would be copied onto itself: {} is the source's own image, which both hosts \
         have: leave --disks out and give --disks-are-shared",
        path.display()
    ))
}

fn not_started(program: &str, error: &io::Error) -> QemuError {
    refused(format!("{program} cannot be started ({error}): install it (Debian: qemu-utils)"))
}

/// Whether a program has ended, or does so within `limit`.
fn ends_within(child: &mut Child, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    loop {
        if !matches!(child.try_wait(), Ok(None)) {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
}

/// What a program that has ended complained of, in a line.
fn complaint(child: &mut Child) -> String {
    let mut said = Vec::new();
    if let Some(errors) = child.stderr.take() {
        let _ = errors.take(WORDS).read_to_end(&mut said);
    }
    String::from_utf8_lossy(&said).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Makes the file, which is empty, an empty image of `size`.
fn fill(path: &Path, format: &str, size: ByteCount) -> io::Result<()> {
    if format == "raw" {
        return OpenOptions::new().write(true).open(path)?.set_len(size.0);
    }
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", format]).arg(path).arg(size.0.to_string());
    let output = command.stdin(Stdio::null()).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// A directory of our own for a socket, which goes with this.
struct Directory(PathBuf);

impl Directory {
    fn make() -> Result<Self, QemuError> {
        let all = run_directory::path();
        let failed = |source| QemuError::Socket { path: all.clone(), source };
        run_directory::make(&all, rustix::process::getuid().as_raw())
            .map_err(|problem| failed(io::Error::new(io::ErrorKind::PermissionDenied, problem)))?;
        // As what is swept away when this process is gone.
        let directory = Self(all.join(format!("{}-nbd-image", Mark::own())));
        let _ = std::fs::remove_dir_all(&directory.0);
        std::fs::DirBuilder::new().mode(0o700).create(&directory.0).map_err(failed)?;
        Ok(directory)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const XML: &str = "<domain><devices><disk type='file'><source file='/nonexistent/a'/>\
                       <target dev='vda'/></disk></devices></domain>";

    fn moving() -> Vec<Moving> {
        vec![Moving { name: "vda".to_owned(), size: 1 << 20, identity: None }]
    }

    fn told(allowed: &DiskChoice, paths: &DiskPaths) -> String {
        let mut xml = XML.to_owned();
        let opened = Images::open(&moving(), [Some(&mut xml), None], allowed, paths, None);
        opened.unwrap_err().to_string()
    }

    #[test]
    fn what_is_there_is_not_taken_by_the_sources_word_alone() {
        let path = std::env::temp_dir().join(format!("godwit-there-{}", std::process::id()));
        std::fs::write(&path, "somebody's").unwrap();
        let at = path.display().to_string();
        let theirs = XML.replace("/nonexistent/a", &at);
        let told = |paths: &DiskPaths, ours: Option<&str>| {
            let descriptions = [Some(&mut theirs.clone()), None];
            let opened = Images::open(&moving(), descriptions, &DiskChoice::All, paths, ours);
            opened.unwrap_err().to_string()
        };
        let unnamed = "is there already, where disk 'vda' is at the source";
        let said = told(&vec![], None);
        assert!(said.contains(unnamed) && said.contains(&format!("--disk vda={at}")), "{said}");
        let other = theirs.replace("'vda'", "'vdb'");
        assert!(told(&vec![], Some(&other)).contains(unnamed));
        // Named, or this host's: its size is looked at.
        for (paths, ours) in
            [(vec![], Some(&*theirs)), (vec![("vda".to_owned(), path.clone())], None)]
        {
            let said = told(&paths, ours);
            assert!(!said.contains("is there already"), "{said}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"somebody's");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn nothing_is_made_that_was_not_allowed() {
        let path = std::env::temp_dir().join(format!("godwit-image-{}", std::process::id()));
        let paths = vec![("vda".to_owned(), path.clone())];
        let said = told(&DiskChoice::Named(vec!["vdb".to_owned()]), &paths);
        assert!(said.contains("was not allowed"), "{said}");
        assert!(!path.exists());
    }

    #[test]
    fn what_no_disk_is_called_is_told() {
        let said = told(&DiskChoice::All, &vec![("sda".to_owned(), "/x".into())]);
        assert!(said.contains("--disk sda=PATH") && said.contains("are vda"), "{said}");
    }

    #[test]
    fn a_directory_that_is_missing_is_told() {
        let said = told(&DiskChoice::All, &Vec::new());
        assert!(said.contains("/nonexistent/a for disk 'vda'"), "{said}");
    }

    #[test]
    fn a_device_is_not_made() {
        let mut xml = XML.replace("file='/n", "dev='/n");
        let descriptions = [Some(&mut xml), None];
        let opened = Images::open(&moving(), descriptions, &DiskChoice::All, &vec![], None);
        let said = opened.unwrap_err().to_string();
        assert!(said.contains("no block device /nonexistent/a"), "{said}");
    }
}
