//! Memory between calls: contexts, compiled kernels, streams, device memory.

use crate::absent::text;
use crate::device_id::DeviceId;
use crate::gpu::{Device, ordinal_of};
use crate::lock::lock;
use crate::options::Settings;
use crate::queue::StreamSlot;
use crate::target::Target;
use etalon_problem::Result;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Devices, compiled kernels and device memory, kept between calls: a call compiles nothing that an earlier one
/// compiled, and finds its memory.
///
/// One workspace serves all devices, passes and problems, from any thread. Calls at the same time have streams and
/// memory of their own.
#[derive(Debug, Default)]
pub struct Workspace {
    settings: Settings,
    devices: Mutex<BTreeMap<usize, Arc<DeviceState>>>,
}

impl Workspace {
    /// Nothing so far.
    pub fn new() -> Self {
        Workspace::default()
    }

    /// Nothing so far, and where to find and keep what is compiled.
    pub fn with(settings: Settings) -> Self {
        Workspace { settings, devices: Mutex::default() }
    }

    /// Fails where a device cannot be used, with the reason: driver, device, architecture, or archive and compiler.
    /// Compiles nothing.
    pub fn check(&self, device: impl Into<DeviceId>) -> Result<()> {
        self.device(device.into()).map(|_| ())
    }

    /// The name and the compute capability of a device, such as `NVIDIA H200 (9.0)`.
    pub fn describe(&self, device: impl Into<DeviceId>) -> Result<String> {
        let device = &self.device(device.into())?.device;
        let name = device.check("the device", device.context.name())?;
        Ok(format!("{name} ({})", text(device.target.capability)))
    }

    /// The compute capability of a device.
    pub fn capability(&self, device: impl Into<DeviceId>) -> Result<(i32, i32)> {
        Ok(self.target(device)?.capability)
    }

    /// Facts of a device.
    pub fn target(&self, device: impl Into<DeviceId>) -> Result<Target> {
        Ok(self.device(device.into())?.device.target)
    }

    /// The UUID of a device.
    pub fn uuid(&self, device: impl Into<DeviceId>) -> Result<DeviceId> {
        Ok(DeviceId::Uuid(self.device(device.into())?.device.uuid))
    }

    /// Gives device memory back that no call uses; contexts and kernels stay.
    pub fn release(&self) {
        lock(&self.devices).values().for_each(|device| lock(&device.slots).clear());
    }

    /// Sets every number of f32 in device memory that is kept, and that no call uses, to `value`, before whatever
    /// runs there next: no result depends on what calls have left. The suite fills workspaces with NaN.
    pub fn fill(&self, value: f32) -> Result<()> {
        let devices: Vec<_> = lock(&self.devices).values().cloned().collect();
        for state in devices {
            for slot in lock(&state.slots).iter() {
                slot.fill(&state.device, value)?;
            }
        }
        Ok(())
    }

    pub(crate) fn device(&self, device: DeviceId) -> Result<Arc<DeviceState>> {
        let mut devices = lock(&self.devices);
        let ordinal = match device {
            DeviceId::Ordinal(ordinal) => ordinal,
            DeviceId::Uuid(uuid) => {
                let state = devices.iter().find(|(_, state)| state.device.uuid == uuid);
                state.map_or_else(|| ordinal_of(uuid), |(&ordinal, _)| Ok(ordinal))?
            }
        };
        if let Some(state) = devices.get(&ordinal) {
            state.device.check_alive()?;
            return Ok(state.clone());
        }
        let device = Device::open(ordinal, &self.settings)?;
        let state = Arc::new(DeviceState { device, slots: Mutex::default() });
        // A context that an earlier fault of the process has ended can be had, but no stream in it.
        state.give_back(state.slot()?);
        devices.insert(ordinal, state.clone());
        Ok(state)
    }
}

/// A device with the streams that no call uses.
#[derive(Debug)]
pub(crate) struct DeviceState {
    pub device: Device,
    slots: Mutex<Vec<StreamSlot>>,
}

impl DeviceState {
    /// A stream with memory, which goes back after success alone: after a failure its work may still be under way.
    pub fn slot(&self) -> Result<StreamSlot> {
        if let Some(slot) = lock(&self.slots).pop() {
            return Ok(slot);
        }
        self.device.check("a stream", self.device.context.new_stream()).map(StreamSlot::new)
    }

    pub fn give_back(&self, slot: StreamSlot) {
        lock(&self.slots).push(slot);
    }
}
