//! Merging a dirty log into a RAM block's bitmap: at every bit offset, against page by page.

use godwit_bench::chart::Chart;
use godwit_bench::report::{Better, Report, median};
use godwit_bitmap::CodePath;
use godwit_units::{PageCount, PageIndex, PageRun};
use serde_json::json;

use crate::pattern::Pattern;
use crate::rounds::{Rounds, table_with_ratios, timed};

/// 256 GiB of guest: 8 MiB of bits.
const PAGES: PageCount = PageCount(256 << 18);
const ROUNDS: usize = 15;

/// What QEMU does for RAM that does not begin on a word of the log: test a bit, test and set
/// another.
fn page_by_page(target: &mut [u64], at: u64, source: &[u64], pages: u64) -> u64 {
    let mut newly = 0;
    for page in 0..pages {
        if source[(page / 64) as usize] >> (page % 64) & 1 == 1 {
            let (word, mask) = (((page + at) / 64) as usize, 1 << ((page + at) % 64));
            newly += u64::from(target[word] & mask == 0);
            target[word] |= mask;
        }
    }
    newly
}

pub(crate) fn run(report: &mut Report) -> anyhow::Result<()> {
    let title =
        "Merge of 8 MiB of dirty log (256 GiB of guest) into a bitmap, ms (× aligned, AVX-512)";
    let mut columns = Vec::new();
    let mut names = Vec::new();
    let patterns = [
        Pattern::Random(0.0),
        Pattern::Random(0.01),
        Pattern::Random(0.1),
        Pattern::Clustered(0.05),
    ];
    for pattern in patterns {
        let source = &pattern.bitmap(PAGES);
        // Some pages of the target are dirty already, so that counting has something to count.
        let target = &Pattern::Random(0.02).bitmap(PAGES + PageCount(64));
        let merge = move |path: CodePath, at: u64| {
            let mut target = target.clone();
            timed(|| {
                let all = PageRun::new(0, PAGES.0);
                target.merge_words_on(path, PageIndex(at), source.words(), all).0
            })
        };
        let paths: Vec<CodePath> = CodePath::available().into_iter().rev().collect();
        let best = paths[0];

        // Every offset against the aligned merge.
        let mut offsets = Rounds::new();
        for at in 0..64 {
            // The offset changes what is newly set: the checksum is left out.
            offsets.add(format!("offset {at}"), move || (merge(best, at).0, 0));
        }
        offsets.run(ROUNDS, 0);
        let ratios: Vec<f64> = (1..64).map(|at| offsets.ratio(at, 0)).collect();
        let worst = (1..64).max_by(|a, b| ratios[a - 1].total_cmp(&ratios[b - 1])).unwrap_or(1);

        let mut rounds = Rounds::new();
        rounds.add("aligned", || (merge(best, 0).0, 0));
        for &path in &paths {
            rounds.add(format!("offset 37, {}", path.name()), move || merge(path, 37));
        }
        let by_page = rounds.add("offset 37, page by page", || {
            let mut words = target.words().to_vec();
            timed(|| page_by_page(&mut words, 37, source.words(), PAGES.0))
        });
        rounds.run(ROUNDS, 1);

        let mut cells = vec![(rounds.seconds(0), 1.0)];
        cells.push((
            median(&(1..64).map(|at| offsets.seconds(at)).collect::<Vec<_>>()),
            median(&ratios),
        ));
        cells.push((offsets.seconds(worst), ratios[worst - 1]));
        cells.extend((1..=by_page).map(|number| (rounds.seconds(number), rounds.ratio(number, 0))));
        names = ["aligned", "misaligned, median of 63 offsets", "misaligned, the worst offset"]
            .map(str::to_owned)
            .into_iter()
            .chain(rounds.names().skip(1).map(str::to_owned))
            .collect();
        let name = pattern.name();
        report.target(
            format!("merge, {name}: worst offset × aligned"),
            ratios[worst - 1],
            1.5,
            Better::Lower,
        );
        report.target(
            format!("merge, {name}: times as fast as page by page"),
            rounds.ratio(by_page, 1),
            50.0,
            Better::Higher,
        );
        columns.push((name, cells));
    }
    table_with_ratios(title, &names, &columns, 1e3);
    for (pattern, cells) in &columns {
        let figures: serde_json::Map<String, serde_json::Value> = names
            .iter()
            .zip(cells)
            .map(|(name, (seconds, ratio))| {
                (name.clone(), json!({ "ms": seconds * 1e3, "ratio": ratio }))
            })
            .collect();
        report.figure(&format!("merge: {pattern}"), figures);
    }
    Chart {
        title: "Merge of 8 MiB of dirty log (256 GiB of guest), one thread".to_owned(),
        axis: "milliseconds".to_owned(),
        series: names,
        groups: columns
            .into_iter()
            .map(|(name, cells)| {
                (name, cells.into_iter().map(|(seconds, _)| seconds * 1e3).collect())
            })
            .collect(),
    }
    .write("structures-merge")?;
    Ok(())
}
