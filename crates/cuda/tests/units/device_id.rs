//! Unit tests of `src/device_id.rs`.

use crate::DeviceId;

#[test]
fn a_uuid_is_read_as_it_is_written_and_nothing_else_is() {
    let device = DeviceId::Uuid(std::array::from_fn(|i| 17 * i as u8));
    assert_eq!(device.to_string().parse(), Ok(device));
    assert_eq!(device.to_string().to_uppercase().parse(), Ok(device));
    assert_eq!(device.to_string().replace("GPU", "MIG").parse(), Ok(device));
    let own = device.to_string();
    for at in 0..own.len() {
        let (head, tail) = own.split_at(at);
        let (mut less, more) = (own.clone(), format!("{head}é{tail}"));
        less.remove(at);
        for text in [less, more, head.to_string()] {
            let error = text.parse::<DeviceId>().unwrap_err();
            assert!(error.to_string().contains("GPU-0011"), "{text}: {error}");
        }
    }
    assert!("-1".parse::<DeviceId>().is_err());
}
