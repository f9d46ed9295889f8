//! Two microvms, each of which has the engine in its own process.

use std::time::Instant;

use anyhow::ensure;
use godwit_e2e::{LIMIT, MicroPair};
use godwit_testbed::{DiskImage, Godwit, MicroVm, Movable, images_for};
use rustix::process::Pid;

use super::{DISK, Outfit, Rig, Side, State};

/// Two microvms.
#[derive(Debug)]
pub struct Micro {
    pair: MicroPair,
    /// Those of the source, and of a destination.
    options: [Vec<String>; 2],
    images: Vec<DiskImage>,
}

fn words(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

impl Micro {
    /// Starts them; `None` where there is no KVM.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn start(outfit: &Outfit) -> anyhow::Result<Option<Self>> {
        if outfit.disk && !images_for("faults") {
            return Ok(None);
        }
        let [memory, fill, set] = [outfit.memory, outfit.fill, outfit.working_set]
            .map(|size| format!("{}MiB", size.0 >> 20));
        let rate = outfit.rate.to_string();
        let both = [
            ["--memory", &memory],
            ["--fill", &fill],
            ["--working-set", &set],
            ["--mode", "rate"],
            ["--rate", &rate],
            ["--tracker", outfit.tracker],
        ];
        let both: Vec<String> = both.as_flattened().iter().map(|&word| word.to_owned()).collect();
        let mut options = [both.clone(), both];
        let mut images = Vec::new();
        if outfit.disk {
            for options in &mut options {
                let image = DiskImage::create("raw", DISK)?;
                options.extend(["--disk".to_owned(), image.path().display().to_string()]);
                images.push(image);
            }
        }
        let pair = MicroPair::start_apart("faults", &words(&options[0]), &words(&options[1]))?;
        Ok(pair.map(|pair| Self { pair, options, images }))
    }

    fn on(&self, side: Side) -> &MicroVm {
        if side == Side::Source { &self.pair.source } else { &self.pair.destination }
    }

    fn new_destination(&self) -> anyhow::Result<MicroVm> {
        MicroVm::start(&self.pair.godwit, &[&words(&self.options[1])[..], &["--incoming"]].concat())
    }
}

impl Rig for Micro {
    fn godwit(&self) -> &Godwit {
        &self.pair.godwit
    }

    fn vm(&self, side: Side) -> String {
        self.on(side).vm_name()
    }

    fn migrate_options(&self) -> Vec<String> {
        match self.images.is_empty() {
            true => Vec::new(),
            false => ["--disks", "all"].map(str::to_owned).to_vec(),
        }
    }

    fn process(&self, side: Side) -> i32 {
        self.on(side).pid()
    }

    fn complaints(&self, side: Side) -> String {
        self.on(side).errors().trim().to_owned()
    }

    fn keeps_no_record(&self) -> bool {
        true
    }

    fn state(&mut self, side: Side) -> State {
        let pair = &mut self.pair;
        let vm = if side == Side::Source { &mut pair.source } else { &mut pair.destination };
        if !vm.is_alive() {
            return State::Gone;
        }
        match vm.status().as_deref() {
            Ok("running") => State::Runs,
            Ok("incoming") => State::Waits,
            Ok(_) => State::Stands,
            Err(_) => State::Gone,
        }
    }

    fn guardian(&self, _: Side) -> anyhow::Result<Option<Pid>> {
        Ok(None)
    }

    fn check_stayed(&mut self) -> anyhow::Result<()> {
        self.pair.check_untouched()
    }

    fn check_arrived(&mut self) -> anyhow::Result<()> {
        let MicroPair { source, destination, .. } = &mut self.pair;
        destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
        let beats = source.heartbeats_across(destination);
        let numbers: Vec<u64> = beats.iter().map(|beat| beat.heartbeat.n).collect();
        ensure!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "beats: {numbers:?}");
        let bugs = [source.bugs(), destination.bugs()].concat();
        ensure!(bugs.is_empty(), "{bugs:?}");
        source.wait(LIMIT).map(drop)
    }

    fn await_alone(&mut self, _: Side) -> anyhow::Result<()> {
        Ok(())
    }

    fn renew(&mut self) -> anyhow::Result<()> {
        if self.state(Side::Destination) != State::Waits {
            self.pair.destination.kill();
            self.pair.destination = self.new_destination()?;
        }
        Ok(())
    }

    fn turn(&mut self) -> anyhow::Result<()> {
        self.pair.source.kill();
        self.options.swap(0, 1);
        let next = self.new_destination()?;
        self.pair.source = std::mem::replace(&mut self.pair.destination, next);
        Ok(())
    }
}
