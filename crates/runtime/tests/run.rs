//! One-shot sandboxes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod support;

use layerpack_fixtures::skip;
use support::{Fixture, missing};

#[test]
fn privileged_a_command_runs_and_nothing_is_left() {
    if let Some(reason) = missing() {
        skip!("{reason}");
    }
    let fixture = Fixture::new("run");
    let output =
        fixture.run("echo hello; id -u; hostname; ps; cat /proc/self/mountinfo; echo oops >&2");
    println!("{output:?}");
    println!("{}", output.stdout);
    assert!(output.ok().starts_with("hello\n0\nbox\n"));
    assert_eq!(output.stderr, "oops\n");
    fixture.assert_nothing_left();
}
