"""A virtual GPU: a PyTorch device whose compute runs on the CPU and whose memory is CUDA's caching allocator.

``setup`` registers the accelerator ``vgpu``. Its allocator is the C++ core of ``kvobs.allocator``: what fits where,
what is split, kept, given back and when memory runs out is what a GPU of that size would do with the same requests. Not
modelled: workspaces of CUDA's libraries, temporaries inside kernels (they lie in host memory), the driver's context,
and the time that kernels take.
"""

from kvobs.virtual._devices import Device, Unavailable, latency_profiles
from kvobs.virtual._library import compiled, why_not
from kvobs.virtual._settings import change_settings, merged
from kvobs.virtual._setup import devices, setup

__all__ = ["Device", "Unavailable", "change_settings", "compiled", "devices", "latency_profiles", "merged",
           "setup", "why_not"]
