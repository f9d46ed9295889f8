mod scan;
fn main() {
    scan::run();
}
