//! `--cpus` and `--nice`: which of the host's processors a command may use, and what it yields to.
//!
//! Both belong to the thread that asks and to all that it starts, the guardian among them, so they
//! are put in force before there is another. What godwit does in the place of a guest, such as
//! answering for a page that is tracked, has the same processors; threads that must wake in time
//! have real-time priority and do not yield.

use std::io;
use std::str::FromStr;

use clap::Args;
use godwit_units::parse_ranges;
use rustix::process::{getpriority_process, setpriority_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::vm::VmName;

/// Where the work is done.
#[derive(Debug, Args)]
pub(crate) struct ProcessorArguments {
    /// Work on these processors of the host only, as in 0-3,8: not on those that guests have for
    /// themselves [default: all]
    #[arg(long, value_name = "LIST")]
    cpus: Option<Processors>,

    /// Yield to other programs where processors are short, 1 (little) to 19 (to all); less is done
    /// at once then, so a move takes longer [default: as it was started]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..=19))]
    nice: Option<i32>,
}

impl ProcessorArguments {
    /// Puts them in force for the calling thread and all that it starts; `vm` is the one that
    /// moves, if it is there already.
    ///
    /// # Errors
    /// With words for the operator; the command is to end then. Processors that cannot be had leave
    /// those in force that were; where --nice is what is refused, --cpus holds already.
    pub(crate) fn apply(&self, vm: Option<&VmName>) -> Result<(), String> {
        if self.cpus.is_none() && self.nice.is_none() {
            return Ok(());
        }
        match vm {
            Some(VmName::Microvm(_)) => {
                return Err(
                    "--cpus and --nice are for VMs of QEMU's: what moves a microvm is its \
                            own process, so start that with taskset(1) or nice(1)"
                        .to_owned(),
                );
            }
            None => {
                return Err("--cpus and --nice would hold for the QEMU that --start starts, too, \
                            and so for its guest: start one that waits, and name it with --vm"
                    .to_owned());
            }
            Some(_) => {}
        }
        if let Some(cpus) = &self.cpus {
            cpus.apply()?;
        }
        let Some(nice) = self.nice else { return Ok(()) };
        let now = getpriority_process(None).unwrap_or(0);
        if nice < now {
            return Err(format!(
                "--nice {nice}: it was started with {now}, and would have to yield less: use {now} \
                 to 19"
            ));
        }
        setpriority_process(None, nice).map_err(|error| format!("--nice {nice}: {error}"))
    }
}

/// Processors of a host, ascending and each once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Processors(Vec<usize>);

impl Processors {
    fn apply(&self) -> Result<(), String> {
        let before = sched_getaffinity(None).map_err(|error| self.failed(error))?;
        let mut wanted = CpuSet::new();
        self.0.iter().for_each(|&number| wanted.set(number));
        // The kernel leaves out those that the host, or the cpuset that this runs in, does not have
        // (sched_setaffinity(2)).
        let set = sched_setaffinity(None, &wanted).and_then(|()| sched_getaffinity(None));
        match set {
            Ok(set) if set == wanted => Ok(()),
            Ok(_) | Err(rustix::io::Errno::INVAL) => {
                // What was in force before can be again.
                let _ = sched_setaffinity(None, &before);
                let there: Vec<usize> =
                    (0..CpuSet::MAX_CPU).filter(|&number| before.is_set(number)).collect();
                let there = Self(there);
                Err(format!("--cpus {self}: this command may use {there} of this host: name those"))
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    fn failed(&self, error: impl Into<io::Error>) -> String {
        format!("--cpus {self}: {}", error.into())
    }
}

impl FromStr for Processors {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = |part: &str| {
            format!(
                "'{part}' names no processors: use numbers from 0 to {}, ranges such as 0-3, and \
                 commas between",
                CpuSet::MAX_CPU - 1
            )
        };
        let ranges = parse_ranges(text).map_err(refused)?;
        if let Some(beyond) = ranges.iter().position(|range| *range.end() >= CpuSet::MAX_CPU) {
            return Err(refused(text.split(',').nth(beyond).unwrap_or(text)));
        }
        let mut all: Vec<usize> = ranges.into_iter().flatten().collect();
        all.sort_unstable();
        all.dedup();
        Ok(Self(all))
    }
}

impl std::fmt::Display for Processors {
    /// As it is written on the command line.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let runs = self.0.chunk_by(|one, next| one + 1 == *next);
        for (number, run) in runs.enumerate() {
            f.write_str(if number == 0 { "" } else { "," })?;
            match run {
                [only] => write!(f, "{only}")?,
                run => write!(f, "{}-{}", run[0], run[run.len() - 1])?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<String, String> {
        text.parse::<Processors>().map(|processors| processors.to_string())
    }

    /// In a thread of its own: it goes with that.
    fn applied(
        cpus: Option<&str>,
        nice: Option<i32>,
        vm: Option<&str>,
    ) -> (Result<(), String>, String) {
        let cpus = cpus.map(|text| text.parse().unwrap());
        let vm = vm.map(|vm| vm.parse().unwrap());
        let arguments = ProcessorArguments { cpus, nice };
        let thread = std::thread::spawn(move || {
            let result = arguments.apply(vm.as_ref());
            let set = sched_getaffinity(None).unwrap();
            let all = (0..CpuSet::MAX_CPU).filter(|&number| set.is_set(number)).collect();
            let nice = getpriority_process(None).unwrap();
            (result, format!("{} {nice}", Processors(all)))
        });
        thread.join().unwrap()
    }

    #[test]
    fn lists_are_read_as_taskset_reads_them() {
        assert_eq!(parsed("0"), Ok("0".to_owned()));
        assert_eq!(parsed("8,0-3,2,9"), Ok("0-3,8-9".to_owned()));
        assert_eq!(parsed("1,3"), Ok("1,3".to_owned()));
        for text in ["", ",", "a", "0-", "-1", "3-1", "+1", "0--2", "1024", "0,,1", "0-99999999999"]
        {
            let error = parsed(text).unwrap_err();
            assert!(error.contains("names no processors: use numbers from 0 to 1023"), "{error}");
        }
    }

    #[test]
    fn they_hold_for_the_thread_and_a_refused_one_changes_nothing() {
        let qemu = Some("qemu:/q");
        let (_, all) = applied(None, None, qemu);
        let last = all.split(' ').next().unwrap().rsplit(['-', ',']).next().unwrap();
        assert_eq!(applied(Some(last), Some(19), qemu), (Ok(()), format!("{last} 19")));
        assert_eq!(applied(Some(last), None, qemu), (Ok(()), format!("{last} 0")));
        for (cpus, vm, words) in [
            ("1023", qemu, "of this host: name those"),
            (&format!("{last},1023"), qemu, "of this host: name those"),
            (last, Some("microvm:/m"), "taskset(1)"),
            (last, None, "start one that waits"),
        ] {
            let (result, after) = applied(Some(cpus), Some(19), vm);
            assert!(result.as_ref().is_err_and(|error| error.contains(words)), "{result:?}");
            assert_eq!(after, all);
        }
        assert_eq!(applied(None, None, None), (Ok(()), all.clone()));
    }

    #[test]
    fn nobody_yields_less_than_he_was_started_with() {
        let arguments = ProcessorArguments { cpus: None, nice: Some(3) };
        let refused = std::thread::spawn(move || {
            setpriority_process(None, 5).unwrap();
            arguments.apply(Some(&"qemu:/q".parse().unwrap()))
        });
        let error = refused.join().unwrap().unwrap_err();
        assert!(error.contains("--nice 3: it was started with 5"), "{error}");
    }
}
