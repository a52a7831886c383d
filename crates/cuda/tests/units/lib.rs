//! Unit tests of `src/lib.rs`, and of files of which the whole crate sees what is tested.

mod args;
mod device;
mod device_id;
mod host;
mod level_table;
mod linear_attention {
    mod log_decays;
}
mod shared;
mod step;
mod target;

/// A reader takes in as many names at one glance; what few programs need lies in a module.
const MOST: usize = 25;

#[test]
fn the_root_has_few_names() {
    let source = include_str!("../../src/lib.rs").replace('\n', " ");
    let public = source.split(';').filter_map(|item| item.trim_start().strip_prefix("pub "));
    let names: Vec<&str> = public
        .flat_map(|item| match item.split_once('{') {
            Some((_, list)) => list.trim_end_matches('}').split(',').map(str::trim).collect(),
            None => item.rsplit([' ', ':']).take(1).collect::<Vec<_>>(),
        })
        .collect();
    assert!(names.contains(&"DevicePass") && names.contains(&"levels"), "{names:?}");
    assert!(names.len() <= MOST, "{} names: {names:?}", names.len());
}
