//! Destinations without room for all that the guest may come to use: refused before anything moves.

use std::os::unix::fs::MetadataExt;

use std::process::Command;

use anyhow::{Context, ensure};
use godwit_e2e::{Pair, check_moved, check_untouched, oldest};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, GuestConfig, MemoryGroup, Mount, QemuBuild, TestVm, VmConfig, builds_for,
    builds_in_turn_for, skip,
};

fn config(build: &QemuBuild) -> VmConfig {
    VmConfig::new(build, GuestConfig::small(Mode::Rate))
}

/// What its RAM file takes of its file system.
fn allocated(vm: &TestVm) -> anyhow::Result<u64> {
    Ok(std::fs::metadata(vm.ram_file())?.blocks() * 512)
}

#[test]
fn a_tmpfs_too_small_for_all_of_the_guest_is_refused() -> anyhow::Result<()> {
    let test = "a_tmpfs_too_small_for_all_of_the_guest_is_refused";
    for build in builds_in_turn_for(test) {
        // The guest has 256 MiB and uses less, which would fit: it would die later, when it grows.
        let mount = match Mount::new("tmpfs", "size=240M") {
            Ok(mount) => mount,
            Err(why) => {
                skip(test, format_args!("{why:#}"));
                return Ok(());
            }
        };
        let config = config(&build);
        let mut pair = Pair::start_apart(&config, &config.clone().with_ram_in(mount.dir()))?;
        let (migrate, receive) = pair.migrate(&[])?;
        let dir = mount.dir().display().to_string();
        for ended in [&migrate, &receive] {
            ensure!(ended.status.code() == Some(1), "{build}: {}: {}", ended.status, ended.errors);
            let words = format!("the tmpfs at {dir} has room for 240MiB of guest memory");
            ensure!(ended.errors.contains(&words), "{}", ended.errors);
        }
        assert_eq!(migrate.last()["phase"], "setup");
        check_untouched(&mut pair.source)?;
        assert_eq!(allocated(&pair.destination)?, 0, "looking allocates nothing");

        // The cure, as it is told; the same QEMU takes the guest in, and its memory stays sparse.
        let cure = format!("mount -o remount,size=256M {dir}");
        ensure!(migrate.errors.contains(&cure), "{}", migrate.errors);
        ensure!(Command::new("sh").args(["-c", &cure]).status()?.success());
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_moved(&mut pair, &migrate)?;
        let taken = allocated(&pair.destination)?;
        ensure!(taken < 250 << 20, "the guest takes {taken} bytes");
        // The files go before their mount does.
        drop(pair);
    }
    Ok(())
}

#[test]
fn a_control_group_too_small_for_all_of_the_guest_is_refused() -> anyhow::Result<()> {
    let test = "a_control_group_too_small_for_all_of_the_guest_is_refused";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let group = match MemoryGroup::new(200 << 20) {
        Ok(group) => group,
        Err(why) => {
            skip(test, format_args!("{why:#}"));
            return Ok(());
        }
    };
    for backend in [Backend::SharedFile, Backend::Anonymous] {
        in_group(&group, &config(oldest(&builds)?).with_backend(backend))
            .with_context(|| format!("{backend:?}"))?;
    }
    Ok(())
}

fn in_group(group: &MemoryGroup, config: &VmConfig) -> anyhow::Result<()> {
    let mut pair = Pair::start(config)?;
    group.take(pair.destination.pid())?;
    let (migrate, _) = pair.migrate(&[])?;
    ensure!(migrate.status.code() == Some(1), "{}: {}", migrate.status, migrate.errors);
    for words in
        ["of memory (/sys/fs/cgroup/", "the guest may come to use 25", "MiB more", "--overcommit"]
    {
        ensure!(migrate.errors.contains(words), "'{words}' is not in: {}", migrate.errors);
    }
    check_untouched(&mut pair.source)?;

    // Whatever godwit itself fills counts to its own group: that of QEMU need not have a limit.
    let root = group.dir().parent().context("no root")?.join("cgroup.procs");
    std::fs::write(root, pair.destination.pid().to_string())?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    group.take(receive.pid())?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &[])?.wait(godwit_e2e::LIMIT)?;
    ensure!(migrate.status.code() == Some(1), "{}: {}", migrate.status, migrate.errors);
    let words = format!("godwit itself (process {}) may take ", receive.pid());
    ensure!(migrate.errors.contains(&words), "'{words}' is not in: {}", migrate.errors);
    drop(receive.wait(godwit_e2e::LIMIT)?);
    check_untouched(&mut pair.source)?;
    group.take(pair.destination.pid())?;

    // Whoever shares memory out more than once says so.
    let (receive, address) = pair.godwit.receive(&pair.destination, &["--overcommit"])?;
    let migrate =
        pair.godwit.migrate(&pair.source, &address, &["--verify"])?.wait(godwit_e2e::LIMIT)?;
    check_moved(&mut pair, &migrate)?;
    ensure!(receive.wait(godwit_e2e::LIMIT)?.status.success());
    // Nobody is in it when it goes.
    pair.destination.kill();
    Ok(())
}

/// Memory and swap that this host could give, in GiB.
fn available() -> anyhow::Result<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let lines = meminfo
        .lines()
        .filter(|line| line.starts_with("MemAvailable:") || line.starts_with("SwapFree:"));
    let kib = lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    Ok(kib.sum::<u64>() >> 20)
}

#[test]
fn a_host_too_small_for_all_of_a_guest_is_refused() -> anyhow::Result<()> {
    // Mutation: memory that no file holds is not counted. Then the guest is taken in.
    let test = "a_host_too_small_for_all_of_a_guest_is_refused";
    for build in builds_in_turn_for(test) {
        // Memory that the guest could have plugged in, of which it has none.
        let size = 2 * available()? + 8;
        let most = format!("slots=1,maxmem={}G", size + 8);
        let object = format!("memory-backend-ram,id=vmem0,size={size}G,reserve=off");
        let extra = [
            "-m",
            &most,
            "-object",
            &object,
            "-device",
            "virtio-mem-pci,memdev=vmem0,requested-size=0",
        ];
        let config = config(&build).with_backend(Backend::Anonymous).with_extra(&extra);
        let mut pair = Pair::start(&config)?;
        let (migrate, receive) = pair.migrate(&[])?;
        for ended in [&migrate, &receive] {
            for words in
                ["this host has ", " of memory to spare", &format!("{size}."), "--overcommit"]
            {
                ensure!(ended.errors.contains(words), "'{words}' is not in: {}", ended.errors);
            }
        }
        assert_eq!(migrate.last()["phase"], "setup");
        ensure!(pair.destination.status()? == "inmigrate", "{build}: it was touched");
        check_untouched(&mut pair.source)?;
    }
    Ok(())
}
