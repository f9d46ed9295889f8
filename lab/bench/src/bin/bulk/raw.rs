//! Uncompressed pages: the engine, with and without fingerprints, against a plain send and receive
//! of the same bytes.

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Instant;

use anyhow::{anyhow, ensure};
use godwit_bench::report::{Better, Report, median};
use godwit_bench::still::{Cost, Ram, Way, process_time, transfer, transfer_into};
use godwit_bench::sys::Mapping;
use godwit_bench::table::{Column, Table, figure};
use godwit_codec::synthetic::Image;
use godwit_testbed::Mount;
use serde_json::json;

/// Streams take turns in pieces of so many bytes, as channels do; one call sends as much as a
/// frame.
const SEGMENT: usize = 16 << 20;
const PIECE: usize = 1 << 20;
const STREAMS: usize = 2;

const TABLE: Table<(&str, f64, f64)> = Table(&[
    Column { head: "", width: 24, cell: |row| row.0.to_owned() },
    Column { head: "GiB/s", width: 7, cell: |row| figure(row.1, 2) },
    Column { head: "CPU s/GiB", width: 11, cell: |row| figure(row.2, 3) },
]);

pub(crate) fn run(report: &mut Report, size: usize, rounds: usize) -> anyhow::Result<()> {
    let gib = size as f64 / f64::from(1 << 30);
    println!("\nuncompressed: {gib} GiB of random bytes, {STREAMS} channels, medians of {rounds}");
    let ram = Ram::filled(Image::Random, size)?;
    let mut runs: [Vec<Cost>; 3] = [const { Vec::new() }; 3];
    for round in 0..rounds {
        // The order rotates: nobody is always first.
        for turn in 0..3 {
            let who = (round + turn) % 3;
            let check = round == 0;
            runs[who].push(match who {
                0 => plain(&ram, check)?,
                1 => transfer(&ram, Way::PLAIN, check)?,
                _ => transfer(&ram, Way { fingerprints: false, ..Way::PLAIN }, check)?,
            });
        }
    }
    let of = |who: usize, pick: fn(&Cost) -> f64| {
        median(&runs[who].iter().map(pick).collect::<Vec<_>>())
    };
    // Times of the rounds by pairs: what drifts between rounds is not in their ratios.
    let ratio = |who: usize, to: usize, pick: fn(&Cost) -> f64| {
        let pairs = runs[who].iter().zip(&runs[to]);
        median(&pairs.map(|(who, to)| pick(who) / pick(to)).collect::<Vec<_>>())
    };
    let mut rows = Vec::new();
    TABLE.print_head();
    for (who, name) in
        ["plain send and recv", "godwit", "godwit, fingerprints off"].into_iter().enumerate()
    {
        let (speed, cpu) = (gib / of(who, |cost| cost.wall), of(who, |cost| cost.cpu) / gib);
        TABLE.print(&(name, speed, cpu));
        let walls: Vec<f64> = runs[who].iter().map(|cost| cost.wall).collect();
        rows.push(json!({ "name": name, "gib_per_second": speed, "cpu_s_per_gib": cpu,
            "seconds": walls }));
    }
    report.figure("uncompressed", rows);
    let cpu = of(1, |cost| cost.cpu) / gib;
    let share = ratio(0, 1, |cost| cost.wall);
    report.target(
        "uncompressed: throughput, share of plain send and recv",
        share,
        0.85,
        Better::Higher,
    );
    report.target("uncompressed: CPU s/GiB, both sides", cpu, 0.9, Better::Lower);
    report.target("uncompressed: CPU s/GiB, both sides: the goal", cpu, 0.6, Better::Lower);
    let fingerprints = |pick| (ratio(1, 2, pick) - 1.0) * 100.0;
    report.target("fingerprints: % of time", fingerprints(|cost| cost.wall), 8.0, Better::Lower);
    report.target(
        "fingerprints: % of processor time",
        fingerprints(|cost| cost.cpu),
        8.0,
        Better::Lower,
    );
    if let Err(problem) = in_huge_pages(report, rounds) {
        println!("huge pages at the destination: not measured: {problem:#}");
    }
    Ok(())
}

/// The same into a tmpfs with huge pages. By itself, and with little memory: huge pages that were
/// not used a moment ago may have been given back to the host of a virtual machine, and to get them
/// again costs more than all else.
fn in_huge_pages(report: &mut Report, rounds: usize) -> anyhow::Result<()> {
    const SIZE: usize = 512 << 20;
    // In huge pages where a file is large enough for them.
    let mount = Mount::new("tmpfs", "huge=within_size,size=100%")?;
    let ram = Ram::filled(Image::Random, SIZE)?;
    let run = |check| transfer_into(&Ram::empty_in(mount.dir(), SIZE)?, &ram, Way::PLAIN, check);
    run(true)?;
    let runs = (0..rounds + 2).map(|_| run(false)).collect::<anyhow::Result<Vec<_>>>()?;
    let gib = SIZE as f64 / f64::from(1 << 30);
    let of = |pick: fn(&Cost) -> f64| median(&runs.iter().map(pick).collect::<Vec<_>>());
    let (speed, cpu) = (gib / of(|cost| cost.wall), of(|cost| cost.cpu) / gib);
    TABLE.print(&("godwit, huge=within_size", speed, cpu));
    report.figure("huge_pages", json!({ "gib_per_second": speed, "cpu_s_per_gib": cpu }));
    report.target("huge=within_size at the destination: CPU s/GiB", cpu, 0.9, Better::Lower);
    report.target(
        "huge=within_size at the destination: CPU s/GiB: the goal",
        cpu,
        0.6,
        Better::Lower,
    );
    Ok(())
}

/// send(2) from a mapping of the one file, recv(2) into a mapping of the other, nothing looked at.
fn plain(ram: &Ram, check: bool) -> anyhow::Result<Cost> {
    let target = Ram::empty(ram.size)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let (began, before) = (Instant::now(), process_time());
    let (from, into) = (Mapping::new(&ram.file, ram.size)?, Mapping::new(&target.file, ram.size)?);
    let mut pairs = Vec::new();
    for _ in 0..STREAMS {
        let out = TcpStream::connect(listener.local_addr()?)?;
        out.set_nodelay(true)?;
        pairs.push((out, listener.accept()?.0));
    }
    let results: Vec<std::io::Result<()>> = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (stream, (out, back)) in pairs.iter().enumerate() {
            let places = move || {
                (0..ram.size).step_by(PIECE).filter(move |at| at / SEGMENT % STREAMS == stream)
            };
            let (from, into) = (&from, &into);
            threads.push(
                scope.spawn(move || {
                    whole(places(), |at, len| from.send(out.as_fd(), &[], at, len, 0))
                }),
            );
            threads.push(
                scope.spawn(move || whole(places(), |at, len| into.receive(back.as_fd(), at, len))),
            );
        }
        let join = |thread: std::thread::ScopedJoinHandle<'_, std::io::Result<()>>| {
            thread.join().unwrap_or_else(|_| Err(std::io::Error::other("a thread panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    let (wall, cpu) = (began.elapsed().as_secs_f64(), (process_time() - before).as_secs_f64());
    results
        .into_iter()
        .collect::<std::io::Result<()>>()
        .map_err(|error| anyhow!("plain: {error}"))?;
    if check {
        ensure!(ram.same(&target)?, "the memories differ after a plain transfer");
    }
    Ok(Cost { wall, cpu, sent: ram.size as u64 })
}

/// Calls `part` (place, bytes at the most) until all pieces are done.
fn whole(
    places: impl Iterator<Item = usize>,
    part: impl Fn(usize, usize) -> std::io::Result<usize>,
) -> std::io::Result<()> {
    for at in places {
        let mut done = 0;
        while done < PIECE {
            match part(at + done, PIECE - done)? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                some => done += some,
            }
        }
    }
    Ok(())
}
