//! A NATS server with JetStream, of a test's own: what several coordinators of an evacuation share.
//!
//! Keeps one promise: it ends with its owner, and what it kept goes too.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::guest::target_dir;
use crate::leftovers::Place;
use crate::skip::skip;

const START_LIMIT: Duration = Duration::from_secs(20);

/// The program, if it can be had; else says that `test` is skipped.
#[must_use]
pub fn nats_for(test: &str) -> Option<PathBuf> {
    let unpacked = target_dir().join("nats/root/usr/sbin/nats-server");
    let installed = ["/usr/sbin/nats-server", "/usr/bin/nats-server"].map(PathBuf::from);
    let found = [unpacked].into_iter().chain(installed).find(|path| path.exists());
    if found.is_none() {
        skip(test, "there is no nats-server: run `make nats`");
    }
    found
}

/// A server that runs; see the module.
#[derive(Debug)]
pub struct Nats {
    program: PathBuf,
    child: Option<Child>,
    place: Place,
    port: u16,
}

impl Nats {
    /// Starts `program`, with these lines in its configuration beside its port and JetStream.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn start(program: &Path, configuration: &str) -> anyhow::Result<Self> {
        // Free a moment ago; the server cannot be handed a socket.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let place = Place::new()?;
        let mut nats = Self { program: program.to_owned(), child: None, place, port };
        let store = nats.place.file("jetstream").display().to_string();
        let text = format!(
            "listen: \"127.0.0.1:{port}\"\npid_file: \"{}\"\n\
             jetstream {{ store_dir: \"{store}\" }}\n{configuration}\n",
            nats.place.pid_file().display()
        );
        std::fs::write(nats.place.file("configuration"), text)?;
        nats.revive()?;
        Ok(nats)
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Ends it, as a crash does.
    ///
    /// # Errors
    /// When that cannot be done.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Starts it again with what it has kept.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn revive(&mut self) -> anyhow::Result<()> {
        self.kill()?;
        let errors = File::options().create(true).append(true).open(self.place.file("stderr"))?;
        let child = Command::new(&self.program)
            .arg("--config")
            .arg(self.place.file("configuration"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .with_context(|| format!("cannot start {}", self.program.display()))?;
        let child = self.child.insert(child);
        let until = Instant::now() + START_LIMIT;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_err() {
            if let Some(status) = child.try_wait()? {
                let said = std::fs::read_to_string(self.place.file("stderr"))?;
                bail!("nats-server ended ({status}): {said}");
            }
            ensure!(Instant::now() < until, "nats-server does not answer");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
