use godwit_bitmap::{CodePath, DirtyBitmap};
use godwit_units::{PageCount, PageIndex, PageRun};
use std::hint::black_box;
use std::time::Instant;

pub struct Rng(pub u64);
impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545F4914F6CDD1D)
    }
    pub fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 1.0) / (1u64 << 53) as f64
    }
}

fn random(b: &mut DirtyBitmap, p: f64) {
    let mut r = Rng(88172645463325252);
    let ln = (1.0 - p).ln();
    let mut at = 0u64;
    loop {
        at += (r.unit().ln() / ln) as u64;
        if at >= b.len().0 {
            break;
        }
        b.set(PageRun::new(at, 1));
        at += 1;
    }
}
fn clustered(b: &mut DirtyBitmap, p: f64, mean: u64) {
    let mut r = Rng(88172645463325252);
    let gap = mean as f64 * (1.0 - p) / p;
    let mut at = 0u64;
    loop {
        at += (-r.unit().ln() * gap) as u64;
        if at >= b.len().0 {
            break;
        }
        let n = 1 + r.next() % (2 * mean - 1);
        b.set(PageRun::new(at, n));
        at += n;
    }
}
pub fn run() {
    let pages = PageCount(384 << 23);
    let mut b = DirtyBitmap::new(pages);
    let cases: Vec<(&str, f64, u64)> = vec![
        ("rand", 0.5, 0),
        ("rand", 0.001, 0),
        ("rand", 0.01, 0),
        ("rand", 0.05, 0),
        ("cl256", 0.05, 256),
        ("cl512", 0.01, 512),
        ("cl512", 0.05, 512),
        ("cl1024", 0.05, 1024),
        ("cl4096", 0.05, 4096),
    ];
    for (n, p, m) in cases {
        b.set_all();
        b.clear_all();
        if p > 0.0 {
            if m == 0 { random(&mut b, p) } else { clustered(&mut b, p, m) }
        }
        print!("{n} {p}: ");
        let read = || {
            let t = Instant::now();
            black_box(black_box(b.words()).iter().fold(0u64, |a, w| a.wrapping_add(*w)));
            t.elapsed().as_secs_f64() * 1e3
        };
        let mut rs: Vec<f64> = (0..5).map(|_| read()).collect();
        rs.sort_by(f64::total_cmp);
        print!("read {:.1} ", rs[2]);
        for path in CodePath::available() {
            let mut ts: Vec<f64> = (0..5)
                .map(|_| {
                    let t = Instant::now();
                    let mut n = 0u64;
                    let mut s = 0u64;
                    b.for_each_run_on(path, |r| {
                        n += r.count.0;
                        s ^= r.start.0;
                    });
                    black_box((n, s));
                    t.elapsed().as_secs_f64() * 1e3
                })
                .collect();
            ts.sort_by(f64::total_cmp);
            print!("{path:?} {:.1} ({:.2}x) ", ts[2], ts[2] / rs[2]);
        }
        println!();
    }
    let _ = PageIndex(0);
}
